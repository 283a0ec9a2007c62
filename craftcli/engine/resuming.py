"""Going on with a run: what it was asked to do, and where it was."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from craftcli.cache.processes import Processes
from craftcli.config import TrainConfig
from craftcli.engine.run_folder import CHECKPOINTS, METRICS_FILE
from craftcli.engine.saving import CONFIG_FILE, STATE_FILE
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.settings import option_name, read_settings

# Settings that change nothing about what is computed.
_MAY_CHANGE = frozenset({"resume", "device", "workers", "log_every", "save_every", "anchor_root"})


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A run that is to go on."""

    run: Path
    config: TrainConfig
    checkpoint: Path
    state: Mapping[str, Any]
    """What the trainer had saved."""

    @property
    def step(self) -> int:
        """Steps that are done."""
        step: int = self.state["step"]
        return step


def read_run(run: Path, given: Mapping[str, Any], processes: Processes) -> Resumed:
    """Where a run was when it was last saved; `given` are settings from the command line."""
    saved = _read_json(run / CONFIG_FILE, run)
    config = TrainConfig(**read_settings(TrainConfig, saved, source=str(run / CONFIG_FILE)))
    changed = [
        name
        for name, value in given.items()
        if name not in _MAY_CHANGE and value != getattr(config, name)
    ]
    if changed:
        told = ", ".join(
            f"{option_name(name)} was {getattr(config, name)} and is {given[name]}"
            for name in changed
        )
        raise CraftError(
            f"The run {run} cannot go on with other settings.",
            why=f"{told}.",
            fix=f"leave them out: craft train --resume {run}; or start a new run with --policy "
            f"{run}.",
            exit_code=EXIT_USAGE,
        )
    checkpoint = run / CHECKPOINTS / "last"
    state = _read_json(checkpoint / STATE_FILE, run)
    allowed = {name: value for name, value in given.items() if name in _MAY_CHANGE}
    config = replace(config, **{**allowed, "output": run, "resume": run})
    return Resumed(
        run=run,
        config=_share_out(config, int(state["world"]), processes),
        checkpoint=checkpoint.resolve(),
        state=state,
    )


def forget_later(run: Path, step: int) -> None:
    """Drop log lines of steps after the checkpoint: they will be taken again."""
    file = run / METRICS_FILE
    if not file.is_file():
        return
    lines = file.read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    fresh = file.with_suffix(".partial")
    fresh.write_text("".join(kept), encoding="utf-8")
    fresh.replace(file)


def _share_out(config: TrainConfig, world: int, processes: Processes) -> TrainConfig:
    """The same batches shared by another number of processes, or a refusal."""
    if world == processes.world:
        return config
    totals = {name: getattr(config, name) * world for name in ("batch_size", "anchor_batch_size")}
    uneven = [name for name, total in totals.items() if total % processes.world]
    if uneven:
        raise CraftError(
            f"The run cannot go on with {processes.world} processes.",
            why=f"it had {world}, and their {option_name(uneven[0])} of {totals[uneven[0]]} in all "
            "cannot be shared out evenly.",
            fix=f"start it with {world} processes.",
            exit_code=EXIT_USAGE,
        )
    return replace(config, **{name: total // processes.world for name, total in totals.items()})


def _read_json(file: Path, run: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CraftError(
            f"There is nothing to go on from in {run}.",
            why=f"{file.name} cannot be read ({error}).",
            fix="give --resume the folder of a run that has saved a checkpoint.",
        ) from error
    return content
