"""`craft train` and `craft dryrun`."""

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from craftcli.choices import Mode
from craftcli.cli.options import settings_command
from craftcli.cli.output import Output, size
from craftcli.cli.quiet import quiet_libraries
from craftcli.config import TrainConfig
from craftcli.demo.defaults import DEMO_TRAINING
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_INTERRUPTED, CraftError
from craftcli.settings import Source, option_name

if TYPE_CHECKING:
    from craftcli.engine.dryrun import DryRun
    from craftcli.engine.retention import Retention
    from craftcli.engine.trainer import Trainer
    from craftcli.policies.loading import Checkpoint


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    settings_command(
        app,
        "train",
        TrainConfig,
        help="Fine-tune the policy on new data while it is held to its teacher.",
        examples=(
            "craft train --mode hidden --steps 20",
            "craft train --mode none --output runs/plain",
            "craft train --policy outputs/my_policy --dataset me/new_task --cache anchors.zarr",
        ),
        demo=DEMO_TRAINING,
    )(train)
    settings_command(
        app,
        "dryrun",
        TrainConfig,
        help="Check everything a run needs and take a few real steps; nothing is kept.",
        examples=(
            "craft dryrun --steps 3",
            "craft dryrun --policy outputs/my_policy --dataset me/new_task --json",
        ),
        demo=DEMO_TRAINING,
        defaults={"steps": 3, "log_every": 1},
        omit=("output", "overwrite", "save_every", "log_every"),
    )(dryrun)


def train(source: Source[TrainConfig], output: Output) -> None:
    """Train and save."""
    config = source.settings
    with output.status("Loading the policy ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.demo.datasets import NEW
        from craftcli.engine.run_folder import check_output, default_output
        from craftcli.engine.session import (
            data_status,
            open_policy,
            open_retention,
            open_task_data,
        )
        from craftcli.engine.trainer import Trainer

        folder = default_output(config)
        check_output(folder, overwrite=config.overwrite)
        student = open_policy(config)
        retention = None
        if config.mode is not Mode.NONE:
            retention = open_retention(config, student, config.cache)
    with output.status(data_status(config, NEW)):
        dataset = open_task_data(config, student)
        trainer = Trainer(config, student, dataset, retention, output=folder)
    _say_demo(config.is_demo, output)
    resolved = {"output": str(folder), "lr": f"{trainer.peak_lr:g}"}
    output.table("Configuration", {**resolved, **_shown(source)})
    output.say(f"Retention mode: {config.mode}")
    if retention:
        _prepare_retention(config, student, trainer, retention, output)
    started = time.perf_counter()
    with output.progress(config.steps, "steps") as advance:
        result = trainer.run(
            on_step=lambda _: advance(1), on_log=lambda entry: output.say(entry.line())
        )
    seconds = time.perf_counter() - started
    output.say(f"Saved {result.checkpoint} after {result.last.step} steps in {seconds:.0f} s")
    output.json(
        {
            "run": str(folder),
            "checkpoint": str(result.checkpoint),
            "seconds": seconds,
            "interrupted": result.interrupted,
            "last": asdict(result.last),
            "settings": config.to_json(),
        }
    )
    if result.interrupted:
        output.warn(f"interrupted after step {result.last.step} of {config.steps}, and saved.")
        raise typer.Exit(EXIT_INTERRUPTED)


def _prepare_retention(
    config: TrainConfig,
    student: "Checkpoint",
    trainer: "Trainer",
    retention: "Retention",
    output: Output,
) -> None:
    """Show that the constraint is real before the first step, or stop."""
    from craftcli.engine.compatibility import require_self_check, self_check
    from craftcli.engine.reach import describe_downstream, find_reach, freeze, require_reach

    output.say(f"anchor cache loaded: {len(retention.anchors)} rows")
    if trainer.trains_on(retention.anchors.manifest.dataset):
        output.warn(
            "the anchors were taken from the very dataset that is trained on; they hold the policy "
            "to its old behaviour there. Build the cache from the old task's data."
        )
    check = self_check(retention)
    if config.other_student:
        output.say(f"L_ret of the other student at the start: {check.drift:.3g} (nmse)")
    else:
        require_self_check(check)
        output.say(f"L_ret at the teacher's weights: {check.drift:.2g} (0 to rounding)")
    reach = find_reach(student.policy, student.adapter, retention, trainer.sample_batch())
    require_reach(reach)
    if config.freeze_downstream:
        freeze(student.policy, reach.downstream)
    described = describe_downstream(reach, frozen=config.freeze_downstream)
    if reach.downstream and not config.freeze_downstream:
        output.warn(f"{described}; --freeze-downstream holds them.")
    else:
        output.say(described[0].upper() + described[1:])


def dryrun(source: Source[TrainConfig], output: Output) -> None:
    """Check, step, measure, and leave nothing behind."""
    with tempfile.TemporaryDirectory(prefix="craft-dryrun-") as scratch:
        with output.status("Loading ..."):
            quiet_libraries(debug=output.debug)
            from craftcli.engine.dryrun import DryRun

        run = DryRun(
            source.settings,
            cache_given=source.origin["cache"] != "default",
            scratch=Path(scratch),
        )
        _say_demo(source.settings.is_demo, output)
        output.say("1. ✓ Configuration is valid")
        output.table("", _shown(source))
        checks = _run_checks(run, output)
        passed = all(check["passed"] for check in checks)
        steps: dict[str, Any] = {}
        if passed:
            try:
                steps = _run_steps(run, output)
            except CraftError as problem:
                passed = False
                output.say(f"{len(checks) + 2}. ✗ failed: Steps: {problem}")
                checks.append({"title": "Steps", "passed": False, "detail": str(problem)})
        settings = {
            name: {"value": value, "source": source.origin[name]}
            for name, value in source.settings.to_json().items()
        }
        output.json({"passed": passed, "settings": settings, "checks": checks, **steps})
    if not passed:
        output.warn("a check failed; craft train would stop here too.")
        raise typer.Exit(EXIT_CHECK_FAILED)


def _run_checks(run: "DryRun", output: Output) -> list[dict[str, Any]]:
    checks = []
    for number, check in enumerate(run.checks(), start=2):
        mark = "✓" if check.passed else "✗ failed:"
        output.say(f"{number}. {mark} {check.title}: {check.detail}")
        checks.append(asdict(check))
    return checks


def _run_steps(run: "DryRun", output: Output) -> dict[str, Any]:
    from craftcli.report.metrics import Window

    window = Window(steps=run.config.steps, mode=run.config.mode)
    reports, entries = [], []
    for report in run.steps():
        window.add(report)
        reports.append(report)
        entries.append(window.flush())
        output.say(entries[-1].line())
    seconds = sum(report.update_s for report in reports) / len(reports)
    memory = run.peak_memory_bytes()
    output.say(f"{len(reports)} steps, {seconds:.3f} s each, peak memory {size(memory)}")
    return {
        "steps": [asdict(entry) for entry in entries],
        "step_s": seconds,
        "peak_memory_bytes": memory,
    }


def _say_demo(is_demo: bool, output: Output) -> None:
    if is_demo:
        output.note("Using the built-in demo: its policy and the data of its new task.")


def _shown(source: Source[TrainConfig]) -> dict[str, str]:
    """Every setting, its value and who decided it."""
    start, end = source.settings.budget
    values = {**source.settings.to_json(), "epsilon_start": start, "epsilon_end": end}
    return {
        option_name(name)[2:]: f"{value}  ({source.origin[name]})"
        for name, value in values.items()
        if value is not None
    }
