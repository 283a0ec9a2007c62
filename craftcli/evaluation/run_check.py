"""What a run is, where it stands, whether it is whole, and whether what it depends on is there."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from craftcli.cache.reading.reader import CacheReader
from craftcli.config.run_paths import find_beside, find_paths
from craftcli.engine.checkpoint_manifest import CheckpointManifest
from craftcli.engine.outside import (
    CACHE,
    LORA_BASE,
    Dependency,
    changed_base,
    changed_files,
    digest_dataset,
    uncovered,
)
from craftcli.engine.run_folder import (
    BEST,
    CHECKPOINTS,
    CONFIG_FILE,
    LAST,
    STATE_FILE,
    lost_run,
    replaced_run,
)
from craftcli.engine.run_lock import holder
from craftcli.engine.saved_steps import checkpoint_steps, last_own_step, written_by_lerobot
from craftcli.engine.summary_file import RunSummary
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE, CraftError
from craftcli.evaluation.results import EVALUATIONS_FOLDER, Evaluation

_SHOWN = ("policy", "dataset", "mode", "cache", "steps", "batch_size", "seed", "lora")


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """One checkpoint, compared with its manifest."""

    step: int
    folder: str
    is_last: bool
    """Whether --resume starts from it."""
    is_best: bool
    """Whether the run, measured while it trained, was best here."""
    has_digests: bool
    """False if an earlier version of craft, or LeRobot, saved it: it cannot be checked."""
    by_lerobot: bool
    """Whether lerobot-train wrote it: nothing held the policy to its teacher meanwhile."""
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DependencyState:
    """Something outside the run that it needs to be resumed."""

    kind: str
    """cache, dataset or lora_base."""
    name: str
    state: str
    """unchanged, changed, missing, or unknown."""
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationState:
    """One evaluation of the run."""

    file: str
    step: int | None
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class RunInspection:
    """Everything that `craft inspect` shows."""

    run: str
    settings: dict[str, Any]
    """The settings that say most about the run."""
    state: str
    """running, finished, interrupted, continued (by lerobot-train), or empty (no checkpoint)."""
    writer: str | None
    """The process that writes it now."""
    step: int
    """Steps done at the last checkpoint."""
    steps: int | None
    skipped: int
    """Steps that were not finite."""
    verdict: dict[str, Any] | None
    """Whether it kept to its budget up to its last checkpoint; None in earlier versions."""
    checkpoints: tuple[CheckpointState, ...]
    depends: tuple[DependencyState, ...]
    evaluations: tuple[EvaluationState, ...]
    own_step: int | None
    """Step of the last checkpoint that craft wrote; lerobot-train may have continued from it."""
    replaces: str | None
    """The folder of an older run, which is removed when this one is finished."""
    problems: tuple[str, ...]
    """All that is damaged; empty if the run is whole."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def inspect_run(path: Path) -> RunInspection:
    """Look at a run and check every digest; nothing is changed.

    Raises:
        CraftError: there is no run at the path.
    """
    run = _require_run(path)
    problems: list[str] = []
    settings = _read_settings(run, problems)
    last = run / CHECKPOINTS / LAST
    steps = checkpoint_steps(run)
    if steps and not last.exists():
        problems.append(f"{CHECKPOINTS}/{LAST} points to nothing")
    last_step = int(last.resolve().name) if last.exists() and steps else 0
    checkpoints = tuple(_check(steps[step], step, last_step) for step in sorted(steps))
    problems += [f"checkpoint {c.step}: {text}" for c in checkpoints for text in c.problems]
    evaluations = tuple(map(_check_evaluation, sorted((run / EVALUATIONS_FOLDER).glob("*.json"))))
    problems += [found.problem for found in evaluations if found.problem]
    writer, total = holder(run), settings.get("steps")
    own_step, summary = last_own_step(run), _summary(run, problems)
    older = replaced_run(run) or lost_run(run)
    summary = _summary(run, problems)
    return RunInspection(
        run=str(run),
        settings={name: settings[name] for name in _SHOWN if name in settings},
        state="continued"
        if any(c.is_last and c.by_lerobot for c in checkpoints)
        else _state(last_step, total, summary, running=writer is not None),
        writer=str(writer) if writer else None,
        step=last_step,
        steps=total,
        skipped=summary.skipped if summary else 0,
        verdict=dict(summary.verdict) if summary and summary.verdict else None,
        checkpoints=checkpoints,
        depends=_check_dependencies(None if own_step is None else steps[own_step]),
        evaluations=evaluations,
        own_step=own_step,
        replaces=str(older) if older else None,
        problems=tuple(problems),
    )


def require_whole(found: RunInspection) -> None:
    """Raise an error that names all that is damaged, if anything is."""
    if not found.problems:
        return
    sound = [c.step for c in found.checkpoints if c.has_digests and not c.problems]
    others = f"resume from step {sound[-1]} with --from {sound[-1]}, or " if sound else ""
    raise CraftError(
        f"The run {found.run} is damaged.",
        why="; ".join(found.problems) + ".",
        fix=f"{others}restore it from a copy.",
        exit_code=EXIT_CHECK_FAILED,
    )


def _require_run(path: Path) -> Path:
    run = path.expanduser()
    if (run / STATE_FILE).is_file():  # a checkpoint of a run
        run = run.resolve().parent.parent
    if (run / CONFIG_FILE).is_file():
        return run
    if (run / "zarr.json").is_file():
        raise CraftError(
            f"{path} is a cache, not a run.",
            why="it holds a zarr.json.",
            fix=f"craft cache inspect {path}",
            exit_code=EXIT_USAGE,
        )
    lost = lost_run(run)
    hint = f"; an earlier run was set aside by a killed --overwrite, in {lost}" if lost else ""
    raise CraftError(
        f"{path} is not a run.",
        why=f"it has no {CONFIG_FILE}{hint}.",
        fix=f"mv {lost} {run}" if lost else "give the folder that craft train wrote.",
        exit_code=EXIT_USAGE,
    )


def _read_settings(run: Path, problems: list[str]) -> dict[str, Any]:
    try:
        settings = json.loads((run / CONFIG_FILE).read_text("utf-8"))
        if isinstance(settings, dict):
            return find_paths(settings, run)
    except (OSError, ValueError):
        pass
    problems.append(f"{CONFIG_FILE} cannot be read")
    return {}


def _summary(run: Path, problems: list[str]) -> RunSummary | None:
    try:
        return RunSummary.read(run)
    except CraftError as error:
        problems.append(f"{error.what} {error.why}".rstrip("."))
        return None


def _state(step: int, steps: Any, summary: RunSummary | None, *, running: bool) -> str:
    if running:
        return "running"
    if not step:
        return "empty"
    if summary is not None and summary.stopped_early:
        return "finished"
    return "finished" if isinstance(steps, int) and step >= steps else "interrupted"


def _check(folder: Path, step: int, last_step: int) -> CheckpointState:
    try:
        manifest = CheckpointManifest.read(folder)
        # The log belongs to checkpoints up to the last: a resumed run writes the rest again.
        found = manifest.problems(folder, log=step <= last_step) if manifest else []
    except ValueError as error:
        manifest, found = None, [str(error)]
    return CheckpointState(
        step=step,
        folder=str(folder),
        is_last=step == last_step,
        is_best=(folder.parent / BEST).resolve().name == folder.name,
        has_digests=manifest is not None,
        by_lerobot=written_by_lerobot(folder),
        problems=tuple(found),
    )


def _check_evaluation(file: Path) -> EvaluationState:
    try:
        return EvaluationState(file=str(file), step=Evaluation.load(file).policy.step, problem=None)
    except CraftError as error:
        return EvaluationState(file=str(file), step=None, problem=error.what.rstrip("."))


def _check_dependencies(checkpoint: Path | None) -> tuple[DependencyState, ...]:
    try:
        manifest = CheckpointManifest.read(checkpoint) if checkpoint else None
    except ValueError:
        manifest = None
    depends = manifest.depends if manifest else {}
    return tuple(
        _check_dependency(kind, _where_now(before, checkpoint))
        for kind, before in depends.items()
        if checkpoint is not None
    )


def _where_now(before: Dependency, checkpoint: Path) -> Dependency:
    """The dependency with the folder in which it is now: it may have moved with the run."""
    if before.folder is None:
        return before
    return replace(before, folder=find_beside(before.folder, checkpoint))


def _check_dependency(kind: str, before: Dependency) -> DependencyState:
    where = before.folder
    if where is not None and not Path(where).exists():
        return DependencyState(kind=kind, name=before.name, state="missing", why=f"no {where}")
    try:
        changes = _changes(kind, before)
    except (CraftError, OSError) as error:
        return DependencyState(kind=kind, name=before.name, state="unknown", why=str(error))
    if changes is None:
        state, why = "unchanged", uncovered(kind, before)
    else:
        state, why = "changed", changes or None
    return DependencyState(kind=kind, name=before.name, state=state, why=why)


def _changes(kind: str, before: Dependency) -> str | None:
    """What of a dependency has changed: empty if that is not known; None if nothing has."""
    folder = before.folder or before.name
    if kind == LORA_BASE:
        return changed_base(before, Path(folder))
    if before.files is not None:
        return changed_files(before.files, digest_dataset(Path(folder), before.files)) or None
    if kind == CACHE:
        now = CacheReader.open(folder).content_digest()
    else:
        # An earlier version saved only this. Imported here, because LeRobot takes long.
        from craftcli.policies.lerobot.datasets import open_recorded_dataset
        from craftcli.policies.lerobot.identity import dataset_identity

        now = dataset_identity(open_recorded_dataset(before.name, folder), []).fingerprint
    return None if now == before.digest else ""
