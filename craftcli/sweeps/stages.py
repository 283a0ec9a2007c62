"""The single jobs of a sweep: each does its work, or finds that it was done."""

import dataclasses
import hashlib
import json
from pathlib import Path

from craftcli.cache.build import build_cache
from craftcli.cache.processes import Processes
from craftcli.cache.reader import CacheReader
from craftcli.cache.sites import open_site
from craftcli.config import CacheConfig, TrainConfig
from craftcli.engine.merged_checkpoint import plan_merge, write_merge
from craftcli.engine.opened import open_run
from craftcli.engine.preparation import prepare
from craftcli.engine.session import open_anchor_data, open_policy
from craftcli.engine.weight_merging import Group
from craftcli.errors import CraftError
from craftcli.evaluation.evaluate import Amounts, evaluate
from craftcli.evaluation.record import FOLDER
from craftcli.evaluation.subject import Plan, open_subject
from craftcli.report.run_summary import RunSummary
from craftcli.run_files import CHECKPOINTS, CONFIG_FILE, MERGE_FILE, SUMMARY_FILE
from craftcli.settings import read_settings
from craftcli.sweeps.plan import RunJob, SweepPlan
from craftcli.sweeps.progress import Bar

# What may differ between a run and what a sweep asks for without making it another run.
_NO_DIFFERENCE = frozenset(
    {"output", "overwrite", "resume", "device", "workers", "log_every", "save_every", "tracker"}
)


class SweepInterruptedError(Exception):
    """The user asked for an end, and the run that was under way is saved."""


def digest_of_teacher(plan: SweepPlan) -> str:
    """Which weights the arms begin with, so that what another teacher left is not kept."""
    return open_subject(plan.teacher, device=plan.device).identity.weights_digest


def cache_is_there(config: CacheConfig, teacher: str) -> bool:
    """Whether a cache of this teacher was built; its folder is named by its settings."""
    if not Path(str(config.output)).is_dir():
        return False
    return CacheReader.open(config.output).manifest.teacher.weights_digest == teacher


def build(config: CacheConfig, bar: Bar) -> None:
    """Build a cache, or go on with one that was interrupted."""
    site = open_site(config.output)
    replaced = Path(str(config.output)).is_dir()
    resume = not replaced and site.unfinished() is not None
    config = dataclasses.replace(config, resume=resume, overwrite=replaced)
    teacher = open_policy(config)
    data = open_anchor_data(config, teacher)
    with bar(config.samples, "rows") as advance:
        build_cache(config, teacher, data, on_plan=lambda _: None, on_rows=advance)


def is_trained(folder: Path, config: TrainConfig, teacher: str) -> bool:
    """Whether a run with these settings and this teacher has taken its last step."""
    summary = RunSummary.read(folder)
    complete = summary is not None and summary.complete
    return complete and _same_run(folder, config, teacher)


def train(folder: Path, config: TrainConfig, teacher: str, bar: Bar) -> None:
    """Train, or go on with a run of the same settings; any other there is replaced."""
    if (folder / CHECKPOINTS / "last").exists() and _same_run(folder, config, teacher):
        config = dataclasses.replace(config, resume=folder)
    opened = open_run(config, {}, Processes.from_environment())
    if opened.retention:
        prepare(opened, opened.retention)
    done = opened.resumed.step if opened.resumed else 0
    with bar(config.steps - done, "steps") as advance:
        result = opened.trainer.run(
            on_step=lambda _: advance(1), on_log=lambda _: None, on_note=lambda _: None
        )
    if result.interrupted:
        raise SweepInterruptedError


def is_merged(job: RunJob) -> bool:
    """Whether the policy in between was made of the run as it is now."""
    file = job.folder / MERGE_FILE
    if not (job.merge and job.base and file.is_file()):
        return False
    report = json.loads(file.read_text("utf-8"))
    same = report["alpha"] == job.merge.alpha and report["groups"] == dict(job.merge.groups)
    return bool(same and file.stat().st_mtime >= (job.base / SUMMARY_FILE).stat().st_mtime)


def merge(job: RunJob, bar: Bar) -> None:
    """Write the policy between a run and its teacher."""
    if not (job.merge and job.base):
        raise ValueError(f"{job.arm} is no merge")
    groups = [Group(pattern=name, alpha=alpha) for name, alpha in job.merge.groups.items()]
    plan = plan_merge(str(job.base), teacher=None, alpha=job.merge.alpha, groups=groups)
    with bar(len(plan.alphas), "tensors") as advance:
        write_merge(plan, job.folder, overwrite=True, on_tensor=advance)


def evaluation_file(folder: Path, plan: SweepPlan, cache: Path | None, teacher: str) -> Path:
    """Where an evaluation is kept: its name says how it was made."""
    parts = [plan.environments, dict(plan.amounts), str(cache), teacher]
    way = json.dumps(parts, sort_keys=True)
    digest = hashlib.sha256(way.encode()).hexdigest()[:8]
    return folder / FOLDER / f"sweep-{digest}.json"


def measure(source: str, plan: SweepPlan, cache: Path | None, file: Path, bar: Bar) -> None:
    """Evaluate a policy; what an earlier sweep found of it in another way is dropped."""
    subject = open_subject(source, device=plan.device)
    what = Plan(cache=cache, environments=plan.environments)
    result = evaluate(subject, what, Amounts(**plan.amounts), bar, anchor_root=None)
    for older in file.parent.glob("sweep-*.json"):
        older.unlink()
    result.save(file)


def _same_run(folder: Path, config: TrainConfig, teacher: str) -> bool:
    file, summary = folder / CONFIG_FILE, RunSummary.read(folder)
    if not file.is_file() or summary is None or summary.teacher != teacher:
        return False
    try:
        saved = read_settings(TrainConfig, json.loads(file.read_text("utf-8")), source=str(file))
    except CraftError:  # of a version of craft with other settings
        return False
    # One that was saved before a setting existed is another run too: defaults change.
    names = [name for name in config.names() if name not in _NO_DIFFERENCE]
    return all(name in saved and saved[name] == getattr(config, name) for name in names)
