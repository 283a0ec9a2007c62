"""Resuming a run: its settings, the checkpoint to start from, and whether that is unchanged."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from craftcli.config.run_paths import (
    PATHS,
    absolute,
    find_paths,
    record_path,
    same_path,
)
from craftcli.config.settings import option_name, read_saved_settings
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.checkpoint_manifest import CheckpointManifest
from craftcli.engine.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    EVALUATIONS_FOLDER,
    LAST,
    METRICS_FILE,
    STATE_FILE,
    SUMMARY_FILE,
    lost_run,
)
from craftcli.engine.run_lock import require_free
from craftcli.engine.saved_steps import (
    checkpoint_steps,
    continued_by_lerobot,
    written_by_lerobot,
)
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE, CraftError
from craftcli.whole_files import whole_file, write_link, write_text

SET_ASIDE = "set-aside-from"
"""Begin of the names of folders in a run: what came after a step from which it was resumed."""
_LONGEST_LINE = 2**20
"""More than any entry of a log has."""
_STATE_FIELDS = ("step", "world", "data", "retention", "execution", "window", "tracker")
# A checkpoint has the sizes of a process among `world` of them; the run's own file, the first ones.
_SHARED = ("batch_size", "anchor_batch_size")


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A run to resume: its settings and a checkpoint."""

    run: Path
    config: TrainConfig
    checkpoint: Path
    state: Mapping[str, Any]
    """The trainer's state at the checkpoint."""
    last: str | None
    """The name of the run's last checkpoint; None if the link is broken."""
    accepts_changes: bool = False
    """Whether the user accepts that something differs from what was saved."""
    planned: int | None = None
    """The steps that the run was to take so far, if --steps has changed that."""

    @property
    def step(self) -> int:
        """Steps done at the checkpoint."""
        step: int = self.state["step"]
        return step

    @property
    def later(self) -> list[Path]:
        """Checkpoints of later steps; there are some if --from chose an earlier one."""
        steps = checkpoint_steps(self.run)
        return [steps[step] for step in sorted(steps, reverse=True) if step > self.step]

    def manifest(self) -> CheckpointManifest | None:
        """The manifest of the checkpoint; None if it has none or if it is damaged."""
        try:
            return CheckpointManifest.read(self.checkpoint)
        except ValueError:
            return None


def read_run(
    run: Path,
    given: Mapping[str, Any],
    processes: Processes,
    *,
    step: int | None = None,
    accept_changes: bool = False,
) -> Resumed:
    """Read a checkpoint of a run: the last, or that of a step.

    `given` are the settings from the command line.
    """
    if processes.is_first:
        require_free(run)
    own = _read_json(run / CONFIG_FILE, run)
    checkpoint = _choose_checkpoint(run, step)
    state = _read_state(checkpoint, run)
    config = _settings(checkpoint if (checkpoint / CONFIG_FILE).is_file() else run, own, run)
    # The run's own file has the last word: a checkpoint may be older than an extension.
    planned = own["steps"] if type(own.get("steps")) is int else config.steps
    steps = _require_left(run, int(given.get("steps", planned)), int(state["step"]))
    place = absolute(run)
    config = replace(config, steps=steps, output=place)
    changeable = TrainConfig.changeable_on_resume()
    _refuse_other_settings(run, config, {n: v for n, v in given.items() if n not in changeable})
    allowed = {n: record_path(n, value) for n, value in given.items() if n in changeable}
    # These belong to one call of the command, not to the run.
    now = {"resume": place, "overwrite": False, "from_": None, "accept_changes": False}
    config = replace(config, **{**allowed, **now})
    return Resumed(
        run=run,
        config=_share_out(config, int(state["world"]), processes),
        checkpoint=checkpoint.resolve(),
        state=state,
        last=_last_name(run),
        accepts_changes=accept_changes,
        planned=planned if steps != planned else None,
    )


def verify_checkpoint(resumed: Resumed, processes: Processes) -> tuple[str, ...]:
    """Compare a checkpoint with its manifest, before anything is loaded; returns notes.

    Raises:
        CraftError: something differs and the user did not accept that; all of it is named.
    """
    found = ["", ""]
    if processes.is_first:
        problems, note = _checkpoint_problems(resumed)
        found = ["; ".join(problems), note]
    problem, note = json.loads(processes.agree(json.dumps(found)))
    if problem and not resumed.accepts_changes:
        raise changed_error(resumed, problem)
    accepted = f"--accept-changes: {problem}." if problem else ""
    return tuple(text for text in (note, accepted) if text)


def changed_error(resumed: Resumed, problem: str) -> CraftError:
    """The error of a run that is not what it was when it was saved."""
    others = sorted(set(checkpoint_steps(resumed.run)) - {resumed.step})
    steps = f", resume from another checkpoint with --from ({_listed(others)})" if others else ""
    return CraftError(
        f"Cannot resume {resumed.run}: something has changed since {resumed.checkpoint.name} was "
        "saved.",
        why=f"{problem}.",
        fix=f"put it back as it was{steps}, or add --accept-changes to continue with it as it is.",
        exit_code=EXIT_CHECK_FAILED,
    )


def require_unmoved(resumed: Resumed) -> None:
    """Refuse to continue, now that the run is locked, if another process has done so meanwhile."""
    if _last_name(resumed.run) != resumed.last or not resumed.checkpoint.is_dir():
        raise CraftError(
            f"The run {resumed.run} has changed while it was opened.",
            why="another process has continued it.",
            fix=f"look at it with craft inspect {resumed.run}, and resume it again if need be.",
        )


def set_later_aside(resumed: Resumed) -> str | None:
    """Move what came after the checkpoint out of the way; returns a sentence about it, or None.

    Later checkpoints, the whole log, the summary and evaluations go to a folder within the run:
    none of them belongs to what follows, and nothing is lost.
    """
    later = resumed.later
    if not later:
        return None
    run, name = resumed.run, resumed.checkpoint.name
    aside = _new_folder(run, f"{SET_ASIDE}-{name}")
    for file in (METRICS_FILE, SUMMARY_FILE):
        if (run / file).is_file():
            shutil.copy2(run / file, aside / file)
    if (run / EVALUATIONS_FOLDER).is_dir():
        (run / EVALUATIONS_FOLDER).rename(aside / EVALUATIONS_FOLDER)
    # The latest first: if this is cut short, the link to it is broken and no plain --resume starts.
    for checkpoint in later:
        checkpoint.rename(aside / checkpoint.name)
    write_link(run / CHECKPOINTS / LAST, name)
    count = f"{len(later)} checkpoint{'s' if len(later) > 1 else ''}"
    return (
        f"what came after step {resumed.step} is kept in {aside}: {count}, with the log and the "
        "evaluations."
    )


def record_steps(resumed: Resumed) -> None:
    """Write another number of steps into the run's own settings; nothing else of them changes."""
    if resumed.planned is not None:
        file = resumed.run / CONFIG_FILE
        own = {**_read_json(file, resumed.run), "steps": resumed.config.steps}
        write_text(file, json.dumps(own, indent=2))


def forget_later(resumed: Resumed) -> None:
    """Drop log lines of steps after the checkpoint: the resumed run repeats these steps."""
    file = resumed.run / METRICS_FILE
    manifest = resumed.manifest()
    if not file.is_file():
        return
    if manifest and manifest.log and not manifest.log_problems(file):
        os.truncate(file, manifest.log.size)
        return
    # Line by line: the log of a long run may be larger than memory.
    with whole_file(file) as kept, file.open("rb") as log:
        for number, line in enumerate(_complete_lines(log), start=1):
            try:
                if int(json.loads(line)["step"]) <= resumed.step:
                    kept.write(line)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if resumed.accepts_changes:
                    continue
                raise CraftError(
                    f"Cannot resume {resumed.run}: its log is damaged.",
                    why=f"line {number} of {file} is not an entry of a step.",
                    fix="remove that line, or add --accept-changes, which leaves it out.",
                ) from error


def _complete_lines(log: BinaryIO) -> Iterator[bytes]:
    """The lines of a log, without half a line at its end: the process died that wrote it.

    Of a line that is longer than any entry, only the beginning.
    """
    while line := log.readline(_LONGEST_LINE):
        end = line
        while end and not end.endswith(b"\n"):
            end = log.readline(_LONGEST_LINE)
        if end:
            yield line


def _checkpoint_problems(resumed: Resumed) -> tuple[list[str], str]:
    """What differs from the manifest, and a note if there is none."""
    checkpoint = resumed.checkpoint
    try:
        manifest = CheckpointManifest.read(checkpoint)
    except ValueError as error:
        return [str(error)], ""
    if manifest is None:
        return [], (
            f"checkpoint {checkpoint.name} has no digests, because an earlier version of craft "
            "saved it: whether it is unchanged cannot be checked."
        )
    return [*manifest.problems(checkpoint), *_settings_problems(resumed)], ""


def _settings_problems(resumed: Resumed) -> list[str]:
    """Settings of the run's own file that are not those of its checkpoint."""
    own = _read_json(resumed.run / CONFIG_FILE, resumed.run)
    saved = _read_json(resumed.checkpoint / CONFIG_FILE, resumed.run)
    # --steps may have changed since.
    fixed = set(TrainConfig.names()) - TrainConfig.neutral() - {*_SHARED, "steps"}
    # A run that an earlier version has begun lacks settings that came later.
    both = fixed & own.keys() & saved.keys()
    differing = sorted(
        name
        for name in both
        if own[name] != saved[name]
        and not (name in PATHS and same_path(name, resumed.run, own, saved))
    )
    return [f"{CONFIG_FILE} has another {option_name(name)}" for name in differing]


def _choose_checkpoint(run: Path, step: int | None) -> Path:
    steps = checkpoint_steps(run)
    if step is None:
        last = run / CHECKPOINTS / LAST
        if written_by_lerobot(last):
            raise continued_by_lerobot(run, last)
        if last.exists() or not steps:
            return last
        raise CraftError(
            f"Cannot resume {run}: its last checkpoint is gone.",
            why=f"{last} points to nothing.",
            fix=f"choose another one with --from; there are {_listed(sorted(steps))}.",
        )
    if step not in steps:
        there = f"there are {_listed(sorted(steps))}" if steps else "there are none"
        raise CraftError(
            f"The run {run} has no checkpoint of step {step}.",
            why=f"{there}.",
            fix="choose one of them with --from, or leave --from out to resume from the last.",
            exit_code=EXIT_USAGE,
        )
    if written_by_lerobot(steps[step]):
        raise continued_by_lerobot(run, steps[step])
    return steps[step]


def _require_left(run: Path, steps: int, done: int) -> int:
    if steps < done:
        raise CraftError(
            f"Cannot end {run} after {steps} steps.",
            why=f"it has taken {done} already.",
            fix=f"give --steps a larger number than {done} to extend the run, or choose an earlier "
            "checkpoint with --from.",
            exit_code=EXIT_USAGE,
        )
    return steps


def _settings(folder: Path, own: dict[str, Any], run: Path) -> TrainConfig:
    """The settings of a checkpoint: its batch sizes are those of its own number of processes."""
    file = folder / CONFIG_FILE
    saved = own if folder == run else _read_json(file, run)
    found = find_paths(saved, run)
    return TrainConfig(**read_saved_settings(TrainConfig, found, source=str(file)))


def _refuse_other_settings(run: Path, config: TrainConfig, given: Mapping[str, Any]) -> None:
    # A run has the absolute paths of what the user may type in another way.
    given = {name: record_path(name, value) for name, value in given.items()}
    changed = [name for name, value in given.items() if value != getattr(config, name)]
    if changed:
        differences = ", ".join(
            f"{option_name(name)} was {getattr(config, name)} and is {given[name]}"
            for name in changed
        )
        raise CraftError(
            f"Cannot resume {run} with other settings.",
            why=f"{differences}.",
            fix=f"leave them out: craft train --resume {run}; or start a new run with --policy "
            f"{run}.",
            exit_code=EXIT_USAGE,
        )


def _share_out(config: TrainConfig, world: int, processes: Processes) -> TrainConfig:
    """Divide the same batches among another number of processes, or refuse."""
    if world == processes.world:
        return config
    own = {name: getattr(config, name) for name in _SHARED}
    # Without anchors there is no number of them.
    totals = {name: size * world for name, size in own.items() if size is not None}
    uneven = [name for name, total in totals.items() if total % processes.world]
    if uneven:
        raise CraftError(
            f"Cannot resume the run with {processes.world} processes.",
            why=f"it had {world}, and their total {option_name(uneven[0])} of {totals[uneven[0]]} "
            "cannot be divided evenly.",
            fix=f"start it with {world} processes.",
            exit_code=EXIT_USAGE,
        )
    return replace(config, **{name: total // processes.world for name, total in totals.items()})


def _read_state(checkpoint: Path, run: Path) -> dict[str, Any]:
    state = _read_json(checkpoint / STATE_FILE, run)
    missing = [name for name in _STATE_FIELDS if name not in state]
    whole = all(type(state.get(name)) is int for name in ("step", "world"))
    if missing or not whole:
        raise CraftError(
            f"Cannot resume {run}: it has no readable checkpoint.",
            why=f"{STATE_FILE} of {checkpoint.name} is damaged"
            + (f": it has no {', '.join(missing)}." if missing else "."),
            fix="choose another checkpoint with --from.",
        )
    return state


def _read_json(file: Path, run: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        lost = lost_run(run)
        hint = (
            f" Its good earlier run was set aside by --overwrite: move {lost} back." if lost else ""
        )
        raise CraftError(
            f"Cannot resume {run}: it has no readable checkpoint.",
            why=f"{file.name} cannot be read ({error}).",
            fix=f"give --resume the folder of a run that has saved a checkpoint.{hint}",
        ) from error
    return content


def _last_name(run: Path) -> str | None:
    last = run / CHECKPOINTS / LAST
    return last.resolve().name if last.exists() else None


def _new_folder(run: Path, name: str) -> Path:
    number = 1
    while True:
        folder = run / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
