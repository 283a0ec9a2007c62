"""The jobs of a sweep: for each kind, whether it was done before, and how to do it."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from craftcli.cache.build.build import build_cache
from craftcli.cache.build.recorded_rows import RecordedFrames
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.by_location import open_destination
from craftcli.config.cache import CacheConfig
from craftcli.config.run_paths import find_paths, record_paths
from craftcli.config.settings import read_settings
from craftcli.config.train import DEFAULT_CACHE, TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.checkpoint_manifest import require_unchanged_policy
from craftcli.engine.ending import mostly_skipped
from craftcli.engine.interpolated_policy import plan_interpolation, write_interpolation
from craftcli.engine.run import open_run, prepare
from craftcli.engine.run_folder import CHECKPOINTS, CONFIG_FILE, LAST, MERGE_FILE, SUMMARY_FILE
from craftcli.engine.summary_file import RunSummary
from craftcli.engine.weight_interpolation import Group
from craftcli.errors import CraftError
from craftcli.evaluation.evaluate import Amounts, evaluate_policy
from craftcli.evaluation.recording import record_frames
from craftcli.evaluation.results import EVALUATIONS_FOLDER
from craftcli.evaluation.subject import Plan, Subject, open_subject
from craftcli.evaluation.while_training import open_evaluator
from craftcli.policies.families.registry import adapter_for
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.sealed_json import unsealed
from craftcli.sources import open_anchor_data, open_policy
from craftcli.sweeps.plan import RunJob, SweepPlan
from craftcli.sweeps.progress import Bar

EARLIER = "earlier"
"""In a folder of evaluations: those of sweeps that measured otherwise. They are not compared."""


class SweepInterruptedError(Exception):
    """The user pressed Ctrl-C; the current run is saved."""


def teacher_digest(plan: SweepPlan) -> str:
    """Digest of the teacher's weights; results of another teacher count as not done."""
    return _open(plan.teacher, plan).identity.weights_digest


def is_built(config: CacheConfig, teacher: str) -> bool:
    """Whether the cache was built with this teacher; its settings are in its folder's name."""
    if not Path(str(config.output)).is_dir():
        return False
    return CacheReader.open(config.output).manifest.teacher.weights_digest == teacher


def build(config: CacheConfig, bar: Bar) -> None:
    """Build a cache, or resume an interrupted build."""
    destination = open_destination(config.output)
    replaced = Path(str(config.output)).is_dir()
    resume = not replaced and destination.interrupted_build() is not None
    config = dataclasses.replace(config, resume=resume, overwrite=replaced)
    require_unchanged_policy(config.policy)
    teacher = open_policy(config)
    if config.env is None:
        data = open_anchor_data(config, teacher)
    else:
        data = record_frames(config, teacher).recorded
    with bar(config.rows, "rows", "Teacher") as advance:
        build_cache(config, teacher, data, on_plan=lambda _: None, on_rows=advance)


def is_trained(folder: Path, config: TrainConfig, teacher: str) -> bool:
    """Whether a run with these settings and this teacher is complete."""
    summary = RunSummary.read(folder)
    complete = summary is not None and summary.complete and 2 * summary.skipped <= summary.steps
    return complete and _same_run(folder, config, teacher)


def train(folder: Path, config: TrainConfig, teacher: str, bar: Bar) -> None:
    """Train, or resume a run of the same settings; any other run in the folder is replaced."""
    if (folder / CHECKPOINTS / "last").exists() and _same_run(folder, config, teacher):
        config = dataclasses.replace(config, resume=folder)
    # A run folder cannot allow remote code: the permission of the sweep file is given again.
    allowed = {name: getattr(config, name) for name in config.permissions()}
    opened = open_run(config, allowed, Processes.from_environment(), record=_record)
    if opened.terms:
        opened = prepare(opened, opened.terms).run
    trainer = opened.trainer(open_evaluator(opened))
    with bar(config.steps - opened.steps_done, "steps", "Training") as advance:
        result = trainer.run(
            on_step=lambda _: advance(1), on_log=lambda _: None, on_note=lambda _: None
        )
    if result.interrupted:
        raise SweepInterruptedError
    if error := mostly_skipped(result.skipped, config.steps, result.checkpoint):
        raise error


def _record(config: CacheConfig, teacher: Checkpoint) -> RecordedFrames:
    return record_frames(config, teacher, exact=False).recorded


def is_interpolated(job: RunJob) -> bool:
    """Whether the interpolated policy was made with these weights, after the run was trained."""
    file = job.folder / MERGE_FILE
    if not (job.interpolation and job.base and file.is_file()):
        return False
    report = _read_json(file)
    wanted = job.interpolation
    same = report.get("alpha") == wanted.alpha and report.get("groups") == dict(wanted.groups)
    trained = job.base / SUMMARY_FILE
    return same and trained.is_file() and file.stat().st_mtime >= trained.stat().st_mtime


def interpolate(job: RunJob, bar: Bar) -> None:
    """Write the policy between a run and its teacher."""
    wanted = job.interpolation
    if not (wanted and job.base):
        raise ValueError(f"{job.arm} is not an interpolation")
    groups = [Group(pattern=name, alpha=alpha) for name, alpha in wanted.groups.items()]
    plan = plan_interpolation(
        str(job.base),
        teacher=None,
        alpha=wanted.alpha,
        groups=groups,
        trust_remote_code=job.trust_remote_code,
    )
    with bar(len(plan.alphas), "tensors", "Interpolating") as advance:
        write_interpolation(plan, job.folder, overwrite=True, on_tensor=advance)


def evaluation_file(folder: Path, plan: SweepPlan, cache: Path | None, teacher: str) -> Path:
    """The file of an evaluation; its name is a digest of how it is measured."""
    parts = [plan.environments, plan.old_environments, dict(plan.amounts), str(cache), teacher]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]
    return folder / EVALUATIONS_FOLDER / f"sweep-{digest}.json"


def evaluate(source: str, plan: SweepPlan, cache: Path | None, file: Path, bar: Bar) -> None:
    """Evaluate a policy; evaluations of earlier sweeps, measured otherwise, are put aside."""
    subject = _open(source, plan)
    reader = None if cache is None else CacheReader.open(cache)
    measured = Plan(
        cache=reader, environments=plan.environments, old_environments=plan.old_environments
    )
    result = evaluate_policy(subject, measured, Amounts(**plan.amounts), bar, anchor_root=None)
    earlier = file.parent / EARLIER
    for older in file.parent.glob("sweep-*.json"):
        earlier.mkdir(exist_ok=True)
        older.rename(earlier / older.name)
    result.save(file)


def _open(source: str, plan: SweepPlan) -> Subject:
    return open_subject(
        source,
        device=plan.device,
        trust_remote_code=plan.trust_remote_code,
        teacher=plan.teacher,
    )


def _same_run(folder: Path, config: TrainConfig, teacher: str) -> bool:
    file, summary = folder / CONFIG_FILE, RunSummary.read(folder)
    if not file.is_file() or summary is None or summary.teacher != teacher:
        return False
    makes_anchors = config.cache == DEFAULT_CACHE
    content = find_paths(_read_json(file), folder)
    try:
        saved = read_settings(TrainConfig, content, source=str(file))
    except CraftError:  # saved by a version of craft with other settings
        return False
    config = record_paths(config, folder)
    if config.anchor_batch_size is None:
        config = dataclasses.replace(
            config, anchor_batch_size=_default_anchors(config, saved, folder)
        )
    # A run saved before a setting existed counts as another run: defaults change.
    names = [name for name in config.names() if name not in config.neutral()]
    if makes_anchors:
        # The run makes its own anchors, and its settings name them.
        names.remove("cache")
    return all(name in saved and saved[name] == getattr(config, name) for name in names)


def _default_anchors(config: TrainConfig, saved: Mapping[str, Any], run: Path) -> int | None:
    """How many anchors a step of a run would have today; what it had if that is unknown."""
    had: int | None = saved.get("anchor_batch_size")
    file = run / CHECKPOINTS / LAST / "pretrained_model/config.json"
    # Missing if nothing was saved yet.
    policy_type = _read_json(file).get("type") if file.is_file() else None
    if policy_type is None or not config.uses_anchors or config.asks_teacher:
        return had
    try:
        varied = CacheReader.open(saved["cache"]).manifest.varied
    except CraftError:  # the cache is gone, and the run needs it no longer
        return had
    share = adapter_for(policy_type).samples_per_anchor
    return config.anchors_a_step(share, varied=varied)


def _read_json(file: Path) -> dict[str, Any]:
    """The content of a file of an earlier sweep, which damage may have reached."""
    try:
        return unsealed(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, str(error)) from error


def _damaged(file: Path, problem: str) -> CraftError:
    return CraftError(
        f"Cannot read {file}.",
        why=f"{problem}.",
        fix="restore it from a copy, or remove its folder: the sweep then does that job again.",
    )
