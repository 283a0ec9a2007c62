"""Running a sweep: every job once, what is done is kept, what broke off goes on."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from craftcli.config import CacheConfig
from craftcli.errors import CraftError
from craftcli.report.compare_runs import SWEEP_FILE
from craftcli.sweeps import stages
from craftcli.sweeps.plan import RunJob, SweepPlan, plan_sweep
from craftcli.sweeps.progress import Bar, Clock, Job, no_bar
from craftcli.sweeps.spec import SweepSpec

TEACHER = "teacher"


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """How a sweep ended."""

    folder: Path
    """For `compare_runs`."""
    done: int
    """Jobs that were done now."""
    kept: int
    """Jobs that were done before."""
    failures: dict[str, CraftError]
    """What went wrong, by the job."""
    skipped: tuple[str, ...]
    """Jobs that need one that failed."""
    interrupted: bool
    """Whether the user asked for an end; running the same sweep again goes on."""


@dataclass(frozen=True, kw_only=True)
class _Task:
    kind: str
    what: str
    is_done: Callable[[], bool]
    do: Callable[[Bar], None]
    needs: tuple[str, ...] = ()


def run_sweep(
    spec: SweepSpec, *, on_job: Callable[[Job], None] = lambda _: None, bar: Bar = no_bar
) -> SweepResult:
    """Build, train, merge and evaluate whatever is not there yet.

    A job that fails is reported in the end; the others are done nevertheless.
    """
    plan = plan_sweep(spec)
    tasks = list(_tasks(spec, plan, stages.digest_of_teacher(plan)))
    _write_index(spec, plan)
    clock = Clock([task.kind for task in tasks])
    failures: dict[str, CraftError] = {}
    skipped: list[str] = []
    done = kept = 0
    interrupted = False
    for number, task in enumerate(tasks, 1):
        broken = any(name in failures or name in skipped for name in task.needs)
        if broken or task.is_done():
            skipped += [task.what] * broken
            kept += not broken
            clock.skip()
            continue
        on_job(Job(number=number, total=len(tasks), what=task.what, left_s=clock.left_s))
        started = time.perf_counter()
        try:
            task.do(bar)
            done += 1
        except stages.SweepInterruptedError:
            interrupted = True
            break
        except CraftError as error:
            failures[task.what] = error
        clock.took(time.perf_counter() - started)
    return SweepResult(
        folder=spec.output,
        done=done,
        kept=kept,
        failures=failures,
        skipped=tuple(skipped),
        interrupted=interrupted,
    )


def _tasks(spec: SweepSpec, plan: SweepPlan, teacher: str) -> Iterator[_Task]:
    """Everything that a sweep does, in an order in which nothing comes before what it needs."""
    for config in plan.caches:
        yield _Task(
            kind="cache",
            what=_cache_name(config),
            is_done=partial(stages.cache_is_there, config, teacher),
            do=partial(stages.build, config),
        )
    yield _evaluation(plan, teacher, TEACHER, spec.output / TEACHER, plan.teacher)
    for job in plan.runs:
        made = _making(job, teacher)
        yield made
        named = f"{job.arm}, seed {job.seed}"
        yield _evaluation(plan, teacher, named, job.folder, str(job.folder), needs=made.what)


def _making(job: RunJob, teacher: str) -> _Task:
    """Training, or the merge of what was trained."""
    named = f"{job.arm}, seed {job.seed}"
    if job.config:
        return _Task(
            kind="train",
            what=f"train {named}",
            is_done=partial(stages.is_trained, job.folder, job.config, teacher),
            do=partial(stages.train, job.folder, job.config, teacher),
            needs=(_cache_name(job.cache),) if job.cache else (),
        )
    base = job.merge.of if job.merge else ""
    return _Task(
        kind="merge",
        what=f"merge {named}",
        is_done=partial(stages.is_merged, job),
        do=partial(stages.merge, job),
        needs=(f"train {base}, seed {job.seed}",),
    )


def _evaluation(
    plan: SweepPlan, teacher: str, named: str, folder: Path, source: str, needs: str | None = None
) -> _Task:
    # The teacher has not drifted from itself.
    cache = None if needs is None else plan.drift_cache
    file = stages.evaluation_file(folder, plan, cache, teacher)
    return _Task(
        kind="eval",
        what=f"evaluate {named}",
        is_done=file.is_file,
        do=partial(stages.measure, source, plan, cache, file),
        needs=(needs,) if needs else (),
    )


def _cache_name(config: CacheConfig) -> str:
    return f"cache {config.output.name}"


def _write_index(spec: SweepSpec, plan: SweepPlan) -> None:
    """Say which folder is which arm, for reports."""
    jobs = {(job.arm, job.seed): job for job in plan.runs}
    # Merges are made last, and shown where the file has them.
    order = [(arm, jobs[arm.name, seed]) for arm in spec.arms for seed in arm.seeds or spec.seeds]
    index = {
        "title": spec.title,
        "old": list(spec.old),
        "new": list(spec.new),
        "runs": [
            {"arm": TEACHER, "seed": None, "folder": TEACHER, "curve": None},
            *(
                {
                    "arm": job.arm,
                    "seed": job.seed,
                    "folder": str(job.folder.relative_to(spec.output)),
                    "curve": arm.curve,
                }
                for arm, job in order
            ),
        ],
    }
    try:
        spec.output.mkdir(parents=True, exist_ok=True)
        text = json.dumps(index, indent=2, ensure_ascii=False)
        (spec.output / SWEEP_FILE).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CraftError(
            f"Cannot write to {spec.output}.",
            why=f"{error.strerror or error}.",
            fix="choose another folder as the sweep's output.",
        ) from error
