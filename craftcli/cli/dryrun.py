"""`craft dryrun`."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from craftcli.cli.options import settings_command, warn_of_unused
from craftcli.cli.output import Output, size
from craftcli.cli.quiet import quiet_libraries
from craftcli.cli.train import say_demo, shown
from craftcli.config import TrainConfig
from craftcli.demo.defaults import DEMO_TRAINING
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.settings import Source
from craftcli.unused import unused_in_training

if TYPE_CHECKING:
    from craftcli.engine.dryrun import DryRun


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
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
        omit=("output", "overwrite", "resume", "save_every", "log_every", "tracker"),
    )(dryrun)


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
        say_demo(source.settings.is_demo, output)
        output.say("1. ✓ Configuration is valid")
        output.table("", shown(source.settings, source.origin))
        checks = _run_checks(run, output)
        passed = all(check["passed"] for check in checks)
        predicted = run.output_kind if passed else None
        warn_of_unused(unused_in_training(run.config, source.given, output=predicted), output)
        steps: dict[str, Any] = {}
        if passed and (out_of_reach := run.out_of_reach()):
            output.warn(out_of_reach)
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
