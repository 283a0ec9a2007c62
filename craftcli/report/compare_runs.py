"""What is known of a run, read from its folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.report.measured import Measured, read_measured
from craftcli.report.run_summary import RunSummary
from craftcli.run_files import CHECKPOINTS, CONFIG_FILE, MERGE_FILE, METRICS_FILE

OLD = "old"
NEW = "new"
SWEEP_FILE = "sweep.json"
"""In the folder of a sweep: which folder is which arm and seed."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Which environments show the old skill and which the new, where they do not say it."""

    old: tuple[str, ...] = ()
    new: tuple[str, ...] = ()

    def of(self, environment: str, own: str | None) -> str | None:
        """The role of an environment."""
        if environment in self.old:
            return OLD
        return NEW if environment in self.new else own


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, a merged policy, or a policy that was only evaluated."""

    folder: Path
    kind: str
    """run, merge, or policy."""
    settings: Mapping[str, Any]
    summary: RunSummary | None
    metrics: tuple[Mapping[str, Any], ...]
    """The lines of metrics.jsonl."""
    measured: Measured | None
    """None when it was never evaluated."""
    saved: bool
    """Whether there is a policy to evaluate."""
    arm: str | None = None
    """The name that a sweep gave it."""
    seed: int | None = None
    curve: str | None = None
    """What it is a point of, where a sweep moved a setting along."""


def read_sources(sources: Sequence[Path]) -> list[RunRecord]:
    """The runs that folders stand for; the folder of a sweep stands for all of its runs."""
    records: list[RunRecord] = []
    for source in sources:
        file = source / SWEEP_FILE
        records += _read_sweep(source) if file.is_file() else [read_record(source)]
    return records


def read_roles(sources: Sequence[Path]) -> Roles:
    """What the sweeps among the folders say of their environments."""
    sweeps = [_read_json(s / SWEEP_FILE) for s in sources if (s / SWEEP_FILE).is_file()]
    return Roles(
        old=tuple(name for sweep in sweeps for name in sweep["old"]),
        new=tuple(name for sweep in sweeps for name in sweep["new"]),
    )


def read_record(folder: Path) -> RunRecord:
    """What is known of one folder."""
    measured = read_measured(folder)
    if (folder / CONFIG_FILE).is_file():
        settings = _read_json(folder / CONFIG_FILE)
        return RunRecord(
            folder=folder,
            kind="run",
            settings=settings,
            summary=RunSummary.read(folder),
            metrics=_read_metrics(folder / METRICS_FILE),
            measured=measured,
            saved=(folder / CHECKPOINTS / "last").exists(),
            seed=settings.get("seed"),
        )
    merged = (folder / MERGE_FILE).is_file()
    if not merged and measured is None:
        raise CraftError(
            f"{folder} is not a run.",
            why=f"it has no {CONFIG_FILE}, no {MERGE_FILE} and no evaluations."
            if folder.is_dir()
            else "there is no such folder or file.",
            fix="give folders of runs, such as runs/*, of a sweep, or files of evaluations.",
            exit_code=EXIT_USAGE,
        )
    report = _read_json(folder / MERGE_FILE) if merged else {}
    return RunRecord(
        folder=folder,
        kind="merge" if merged else "policy",
        settings={name: report[name] for name in ("alpha", "groups") if name in report},
        summary=None,
        metrics=(),
        measured=measured,
        saved=True,
    )


def _read_sweep(folder: Path) -> list[RunRecord]:
    records = []
    for entry in _read_json(folder / SWEEP_FILE)["runs"]:
        own = folder / entry["folder"]
        # A sweep that is still under way has folders to come.
        if own.is_dir() and any(own.iterdir()):
            named = {name: entry.get(name) for name in ("arm", "seed", "curve")}
            records.append(replace(read_record(own), **named))
    if not records:
        raise CraftError(
            f"The sweep {folder} has nothing to compare.",
            why="none of its runs has begun.",
            fix="run it with craft compare --sweep FILE.toml.",
        )
    return records


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CraftError(
            f"Cannot read {file}.",
            why=f"{error}.",
            fix="restore it from a copy, or leave this folder out.",
        ) from error
    return content


def _read_metrics(file: Path) -> tuple[Mapping[str, Any], ...]:
    if not file.is_file():
        return ()
    lines = file.read_text("utf-8").splitlines(keepends=True)
    # A run that was killed, or is writing now, may have left half a line.
    return tuple(json.loads(line) for line in lines if line.endswith("\n"))
