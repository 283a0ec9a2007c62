"""Reads runs from their folders: settings, summary, metrics, and what evaluations measured."""

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from craftcli.compare.curves import Curves, read_curves
from craftcli.engine.checkpoint_manifest import CheckpointManifest
from craftcli.engine.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    LAST,
    MERGE_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
)
from craftcli.engine.saved_steps import written_by_lerobot
from craftcli.engine.summary_file import RunSummary
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE, CraftError
from craftcli.evaluation.results import EVALUATIONS_FOLDER, Evaluation, Success
from craftcli.sealed_json import unsealed

OLD = "old"
NEW = "new"
SWEEP_FILE = "sweep.json"
"""In the folder of a sweep: the arm and seed of each run's folder."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Which environments show the old skill and which the new, if they do not say so."""

    old: tuple[str, ...] = ()
    new: tuple[str, ...] = ()

    def of(self, environment: str, own: str | None) -> str | None:
        """The role of an environment; `own` is the one that it has by itself."""
        if environment in self.old:
            return OLD
        return NEW if environment in self.new else own


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A measured number; only numbers with the same basis can be compared."""

    value: float
    basis: str
    """What it was measured on."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What evaluations found of the latest checkpoint of a policy.

    Of several evaluations in an environment, the one with the most episodes counts, and among
    equals the latest. Drift and action error are those of the latest.
    """

    policy: str
    """Digest of its weights."""
    successes: Mapping[str, Success]
    """By the name of the environment."""
    drift: Quantity | None
    """The nmse of the hidden states, mean over layers."""
    action_error: Quantity | None
    """Distance of the actions from the teacher's."""
    of_teacher: Mapping[str, Success] = field(default_factory=dict)
    """The success of the run's teacher, by the name of the environment, where it was measured."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, an interpolated policy, or a policy that was only evaluated."""

    folder: Path
    kind: str
    """`run`, `merge` (an interpolated policy), or `policy`."""
    settings: Mapping[str, Any]
    summary: RunSummary | None
    metrics: tuple[Mapping[str, Any], ...]
    """Points of its curves, from metrics.jsonl."""
    measured: Measured | None
    """None if it was never evaluated."""
    saved: bool
    """Whether there is a policy to evaluate."""
    arm: str | None = None
    """The name of its arm, if a sweep ran it."""
    seed: int | None = None
    curve: str | None = None
    """The curve that it is a point of, if a sweep varied one setting."""
    content: str = ""
    """Digest of what the run wrote, by which a copy is recognised; empty if unknown."""
    damage: CraftError | None = None
    """Why its curves are missing, if their file is damaged."""


@dataclass(frozen=True, kw_only=True)
class FoundRuns:
    """The runs in some folders, each once."""

    records: tuple[RunRecord, ...]
    roles: Roles
    """The roles that sweeps give to their environments."""
    damage: tuple[CraftError, ...]
    """What could not be read; the runs that it belongs to are left out."""
    notes: tuple[str, ...]
    """Which runs were given twice, and which ones lerobot-train has continued."""


def read_sources(sources: Sequence[Path]) -> FoundRuns:
    """Read the runs in these folders; the folder of a sweep gives all of its runs.

    Raises:
        CraftError: a folder holds no run, or none can be read.
    """
    records: list[RunRecord] = []
    damage: list[CraftError] = []
    old: list[str] = []
    new: list[str] = []
    # Runs that make their own anchors keep them beside them, where runs/* finds them too.
    runs = [source for source in sources if ".zarr" not in source.suffixes]
    for source in runs or sources:
        try:
            if (source / SWEEP_FILE).is_file():
                sweep = _read_index(source)
                old, new = old + sweep["old"], new + sweep["new"]
                records += _read_sweep(source, sweep["runs"], damage)
            else:
                records.append(read_run(source))
        except CraftError as error:
            if error.exit_code == EXIT_USAGE:
                raise
            damage.append(error)
    if not records and damage:
        first = damage[0]
        raise CraftError(
            first.what, why=first.why, fix=first.fix, exit_code=EXIT_CHECK_FAILED
        ) from first
    damage += [record.damage for record in records if record.damage]
    kept, notes = _each_once(records)
    notes += [
        f"lerobot-train has continued {record.folder}, and nothing held the policy to its teacher "
        "meanwhile: settings, time and curves are those of craft's steps."
        for record in kept
        if record.kind == "run" and written_by_lerobot(record.folder / CHECKPOINTS / LAST)
    ]
    return FoundRuns(
        records=tuple(kept),
        roles=Roles(old=tuple(old), new=tuple(new)),
        damage=tuple(damage),
        notes=tuple(notes),
    )


def _each_once(records: Sequence[RunRecord]) -> tuple[list[RunRecord], list[str]]:
    """Leave out runs that were given before, or copies of such: a run is one seed."""
    kept: dict[Hashable, RunRecord] = {}
    places: dict[Hashable, Hashable] = {}
    notes = []
    for record in records:
        place: Hashable = record.folder.resolve()
        names = [place, *([record.content] if record.content else [])]
        first = next((places[name] for name in names if name in places), None)
        if first is None:
            places |= dict.fromkeys(names, place)
            kept[place] = record
            continue
        seen = kept[first]
        notes.append(
            f"{record.folder} is the same run as {seen.folder}: it counts once."
            if record.folder != seen.folder
            else f"{record.folder} was given twice: it counts once."
        )
        kept[first] = replace(seen, measured=seen.measured or record.measured)
    return list(kept.values()), notes


def read_run(folder: Path) -> RunRecord:
    """Read one run, interpolated policy or evaluation.

    Raises:
        CraftError: the folder holds none of these.
    """
    measured = read_measured(folder)
    if (folder / CONFIG_FILE).is_file():
        return _read_trained(folder, measured)
    if (folder / CHECKPOINTS).is_dir():
        raise _damaged(folder / CONFIG_FILE, "it is missing from a folder with checkpoints")
    interpolated = (folder / MERGE_FILE).is_file()
    if not interpolated and measured is None:
        raise CraftError(
            f"{folder} is not a run.",
            why=f"it has no {CONFIG_FILE}, no {MERGE_FILE} and no evaluations."
            if folder.is_dir()
            else "there is no such folder or file.",
            fix="give folders of runs, such as runs/*, folders of sweeps, or evaluation files.",
            exit_code=EXIT_USAGE,
        )
    report = _read_json(folder / MERGE_FILE) if interpolated else {}
    if interpolated and not isinstance(report.get("alpha"), int | float):
        raise _damaged(folder / MERGE_FILE, "alpha is no number")
    return RunRecord(
        folder=folder,
        kind="merge" if interpolated else "policy",
        settings={name: report[name] for name in ("alpha", "groups") if name in report},
        summary=None,
        metrics=(),
        measured=measured,
        saved=True,
        content=_digest(
            [folder / MERGE_FILE] if interpolated else sorted(_evaluation_files(folder))
        ),
    )


def _read_trained(folder: Path, measured: Measured | None) -> RunRecord:
    settings, summary = _read_json(folder / CONFIG_FILE), RunSummary.read(folder)
    if not isinstance(settings.get("mode"), str):
        raise _damaged(folder / CONFIG_FILE, "it does not name the mode of a run")
    if summary:
        _check_numbers(summary, folder / SUMMARY_FILE)
    damage, manifest = None, _manifest(folder)
    if manifest and (problems := manifest.record_problems(folder / CHECKPOINTS / LAST)):
        raise _damaged(folder, "; ".join(problems))
    try:
        curves = read_curves(folder / METRICS_FILE)
        if manifest and (problems := manifest.log_problems(folder / METRICS_FILE)):
            raise _damaged(folder / METRICS_FILE, problems[0])
    except CraftError as error:
        # Its results are whole: only the curves are left out.
        curves, damage = Curves(points=(), digest=""), error
    digest = _digest([folder / CONFIG_FILE, folder / SUMMARY_FILE])
    return RunRecord(
        folder=folder,
        kind="run",
        settings=settings,
        summary=summary,
        metrics=curves.points,
        measured=measured,
        saved=(folder / CHECKPOINTS / "last").exists(),
        seed=settings.get("seed"),
        content=f"{digest} {curves.digest}" if curves.digest else "",
        damage=damage,
    )


def _manifest(run: Path) -> CheckpointManifest | None:
    """The manifest of the last checkpoint; `craft inspect` says if it is damaged."""
    try:
        return CheckpointManifest.read(run / CHECKPOINTS / LAST)
    except ValueError:
        return None


def _check_numbers(summary: RunSummary, file: Path) -> None:
    for name in ("steps", "steps_done", "seconds", "peak_memory_bytes", "trainable_parameters"):
        if type(getattr(summary, name)) not in (int, float):
            raise _damaged(file, f"{name} is no number")
    if type(summary.anchors) not in (int, type(None)):
        raise _damaged(file, "anchors is no number")


def _digest(files: Sequence[Path]) -> str:
    """Digest of small files; a missing one counts as empty."""
    content = [file.read_bytes() if file.is_file() else b"" for file in files]
    return hashlib.sha256(b"\0".join(content)).hexdigest()


def read_measured(source: Path) -> Measured | None:
    """Read the evaluations of a folder, or one evaluation file; None if there are none."""
    files = _evaluation_files(source)
    found = [evaluation for _, evaluation in sorted(map(_dated, files), key=lambda pair: pair[0])]
    # If training continued, earlier evaluations are of a policy that the run no longer has.
    last = max((evaluation.policy.step or 0 for evaluation in found), default=0)
    measured = None
    for evaluation in found:
        if (evaluation.policy.step or 0) == last:
            measured = _update(measured, evaluation)
    return measured


def _dated(file: Path) -> tuple[tuple[str, int, str], Evaluation]:
    """An evaluation and its time; a copied file may have lost its own."""
    evaluation, stat = Evaluation.load(file), file.stat()
    written = datetime.fromtimestamp(stat.st_mtime, UTC).isoformat(timespec="milliseconds")
    return (evaluation.when or written, stat.st_mtime_ns, file.name), evaluation


def _update(before: Measured | None, later: Evaluation) -> Measured:
    """Add what a later evaluation measured; a smaller one replaces no larger one."""
    if before is not None and before.policy != later.policy.weights_digest:
        before = None  # the weights have changed since
    drift, action = later.drift, later.drift and later.drift.action
    new_drift = new_error = None
    if drift and drift.layers:
        nmse = fmean(layer.nmse for layer in drift.layers)
        new_drift = Quantity(value=nmse, basis=drift.cache_digest)
    if drift and action:
        basis = f"{drift.cache_digest} {action.kind} {action.rows}"
        new_error = Quantity(value=action.value, basis=basis)
    return Measured(
        policy=later.policy.weights_digest,
        successes=_larger(before.successes if before else {}, later.success),
        of_teacher=_larger(before.of_teacher if before else {}, later.teacher_success),
        drift=new_drift or (before.drift if before else None),
        action_error=new_error or (before.action_error if before else None),
    )


def _larger(before: Mapping[str, Success], later: Sequence[Success]) -> dict[str, Success]:
    """For each environment the success over the most episodes; the later of equals."""
    found = dict(before)
    for success in later:
        known = found.get(success.environment)
        if known is None or len(success.episodes) >= len(known.episodes):
            found[success.environment] = success
    return found


def _evaluation_files(source: Path) -> list[Path]:
    return [source] if source.is_file() else list((source / EVALUATIONS_FOLDER).glob("*.json"))


def _read_index(folder: Path) -> dict[str, Any]:
    """The file that says which folder is which arm and seed."""
    file = folder / SWEEP_FILE
    index = _read_json(file)
    runs = index.get("runs")
    whole = isinstance(runs, list) and all(
        isinstance(run, dict) and isinstance(run.get("folder"), str) for run in runs
    )
    names = [index.get(role) for role in (OLD, NEW)]
    if not whole or not all(isinstance(name, list) for name in names):
        raise _damaged(file, "it is not the index of a sweep")
    return index


def _read_sweep(
    folder: Path, runs: Sequence[Mapping[str, Any]], damage: list[CraftError]
) -> list[RunRecord]:
    """The runs of a sweep that have started; those that cannot be read go to `damage`."""
    records = []
    before = len(damage)
    for entry in runs:
        run = folder / entry["folder"]
        # A sweep that is still running has not created all folders yet.
        if run.is_dir() and any(run.iterdir()):
            named: dict[str, Any] = {n: entry.get(n) for n in ("arm", "seed", "curve")}
            try:
                records.append(replace(read_run(run), **named))
            except CraftError as error:
                damage.append(error)
    if not records and len(damage) == before:
        raise CraftError(
            f"The sweep {folder} has nothing to compare.",
            why="none of its runs has started.",
            fix="run it with craft compare --sweep FILE.toml.",
            exit_code=EXIT_USAGE,
        )
    return records


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return unsealed(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, str(error)) from error


def _damaged(file: Path, problem: str) -> CraftError:
    return CraftError(
        f"Cannot read {file}.",
        why=f"{problem}.",
        fix="restore it from a copy, or leave this folder out.",
        exit_code=EXIT_CHECK_FAILED,
    )
