"""Runs a sweep: does every job that is not done yet, and resumes what was interrupted."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from craftcli.compare.runs import SWEEP_FILE
from craftcli.config.cache import CacheConfig
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.sealed_json import sealed
from craftcli.sweeps import jobs
from craftcli.sweeps.plan import RunJob, SweepPlan, plan_sweep
from craftcli.sweeps.progress import Bar, Clock, Job, no_bar
from craftcli.sweeps.sweep_file import SweepSpec
from craftcli.whole_files import write_text

TEACHER = "teacher"


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """How a sweep ended."""

    folder: Path
    """For `compare_runs`."""
    done: int
    """How many jobs were done now."""
    kept: int
    """How many jobs were done before."""
    failures: dict[str, CraftError]
    """The error of each job that failed."""
    skipped: tuple[str, ...]
    """Jobs that depend on one that failed."""
    interrupted: bool
    """Whether the user pressed Ctrl-C; running the sweep again resumes it."""


@dataclass(frozen=True, kw_only=True)
class _Task:
    """One job, with the names of those that it depends on."""

    kind: str
    what: str
    """Its name, as users see it."""
    is_done: Callable[[], bool]
    do: Callable[[Bar], None]
    needs: tuple[str, ...] = ()


def run_sweep(
    spec: SweepSpec,
    *,
    on_job: Callable[[Job], None] = lambda _: None,
    on_failure: Callable[[str, CraftError], None] = lambda what, error: None,
    bar: Bar = no_bar,
) -> SweepResult:
    """Build, train, interpolate and evaluate whatever is missing.

    A job that fails does not stop the others; `on_failure` gets its error at once, and the result
    has it too.
    """
    plan = plan_sweep(spec)
    tasks = list(_tasks(spec, plan, jobs.teacher_digest(plan)))
    _write_index(spec, plan)
    clock = Clock([task.kind for task in tasks])
    failures: dict[str, CraftError] = {}
    skipped: list[str] = []
    done = kept = 0
    interrupted = False
    for number, task in enumerate(tasks, 1):
        broken = any(name in failures or name in skipped for name in task.needs)
        try:
            finished = not broken and task.is_done()
        except CraftError as error:
            failures[task.what] = _as_damage(error)
            on_failure(task.what, failures[task.what])
            clock.skip()
            continue
        if broken or finished:
            skipped += [task.what] * broken
            kept += finished
            clock.skip()
            continue
        on_job(Job(number=number, total=len(tasks), what=task.what, left_s=clock.left_s))
        started = time.perf_counter()
        try:
            task.do(bar)
            done += 1
        except jobs.SweepInterruptedError:
            interrupted = True
            break
        except CraftError as error:
            failures[task.what] = error
            on_failure(task.what, error)
        clock.took(time.perf_counter() - started)
    return SweepResult(
        folder=spec.output,
        done=done,
        kept=kept,
        failures=failures,
        skipped=tuple(skipped),
        interrupted=interrupted,
    )


def _as_damage(error: CraftError) -> CraftError:
    """The error of a result that was there and could not be read."""
    return CraftError(error.what, why=error.why, fix=error.fix, exit_code=EXIT_CHECK_FAILED)


def _tasks(spec: SweepSpec, plan: SweepPlan, teacher: str) -> Iterator[_Task]:
    """All jobs, each after those that it depends on."""
    for config in plan.caches:
        yield _Task(
            kind="cache",
            what=_cache_name(config),
            is_done=partial(jobs.is_built, config, teacher),
            do=partial(jobs.build, config),
        )
    yield _evaluation(plan, teacher, TEACHER, spec.output / TEACHER, plan.teacher)
    for job in plan.runs:
        training = _training(job, teacher)
        yield training
        name = f"{job.arm}, seed {job.seed}"
        yield _evaluation(plan, teacher, name, job.folder, str(job.folder), needs=training.what)


def _training(job: RunJob, teacher: str) -> _Task:
    """The training of a run, or the interpolation of one."""
    name = f"{job.arm}, seed {job.seed}"
    if job.config:
        return _Task(
            kind="train",
            what=f"train {name}",
            is_done=partial(jobs.is_trained, job.folder, job.config, teacher),
            do=partial(jobs.train, job.folder, job.config, teacher),
            needs=(_cache_name(job.cache),) if job.cache else (),
        )
    base = job.interpolation.of if job.interpolation else ""
    return _Task(
        kind="merge",
        what=f"merge {name}",
        is_done=partial(jobs.is_interpolated, job),
        do=partial(jobs.interpolate, job),
        needs=(f"train {base}, seed {job.seed}",),
    )


def _evaluation(
    plan: SweepPlan, teacher: str, name: str, folder: Path, source: str, needs: str | None = None
) -> _Task:
    # Without `needs` it is the teacher, which does not drift from itself.
    cache = None if needs is None else plan.drift_cache
    file = jobs.evaluation_file(folder, plan, cache, teacher)
    return _Task(
        kind="eval",
        what=f"evaluate {name}",
        is_done=file.is_file,
        do=partial(jobs.evaluate, source, plan, cache, file),
        needs=(needs,) if needs else (),
    )


def _cache_name(config: CacheConfig) -> str:
    return f"cache {config.output.name}"


def _write_index(spec: SweepSpec, plan: SweepPlan) -> None:
    """Write which folder is which arm and seed, for craft compare."""
    by_name = {(job.arm, job.seed): job for job in plan.runs}
    # In the order of the file; interpolations are run last.
    order = [
        (arm, by_name[arm.name, seed]) for arm in spec.arms for seed in arm.seeds or spec.seeds
    ]
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
        text = json.dumps(sealed(index), indent=2, ensure_ascii=False)
        write_text(spec.output / SWEEP_FILE, text)
    except OSError as error:
        raise CraftError(
            f"Cannot write to {spec.output}.",
            why=f"{error.strerror or error}.",
            fix="choose another folder as the output of the sweep.",
        ) from error
