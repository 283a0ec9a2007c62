"""`craft dryrun`: check everything a run needs and take a few real steps."""

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from craftcli.cli.early_checks import check_inputs
from craftcli.cli.next_steps import after_dryrun
from craftcli.cli.options import add_settings_command, warn_of_unused
from craftcli.cli.output import Output, size
from craftcli.cli.quiet import quiet_libraries
from craftcli.cli.recording import record_episodes
from craftcli.cli.settings_table import show_settings
from craftcli.cli.train import (
    MAIN_OPTIONS,
    note_demo,
    open_training_evaluator,
    resolved_retention,
)
from craftcli.config.retention import DEFAULT_EPSILON
from craftcli.config.settings import Source
from craftcli.config.train import TrainConfig
from craftcli.config.unused import unused_in_training
from craftcli.demo.defaults import DEMO_TRAINING
from craftcli.errors import EXIT_CHECK_FAILED, CraftError

if TYPE_CHECKING:
    from craftcli.engine.dryrun import DryRun

_OWN_DEFAULTS = {"steps": 3, "log_every": 1}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_settings_command(
        app,
        "dryrun",
        TrainConfig,
        dryrun,
        help="Check everything a run needs and take a few real steps; nothing is kept.",
        examples=(
            "craft dryrun --steps 3",
            "craft dryrun --policy outputs/my_policy --dataset me/new_task --json",
        ),
        main=MAIN_OPTIONS,
        omit=(
            "output",
            "overwrite",
            "resume",
            "from_",
            "accept_changes",
            "save_every",
            "log_every",
            "tracker",
        ),
        demo=DEMO_TRAINING,
        defaults=_OWN_DEFAULTS,
    )


def dryrun(source: Source[TrainConfig], output: Output) -> None:
    """Check, step and measure in a temporary folder."""
    note_demo(source.settings.is_demo, output)
    output.say("1. ✓ Configuration is valid")
    # The default of a user's policy is known when it is open.
    epsilon = DEFAULT_EPSILON if source.settings.is_demo else None
    resolved = resolved_retention(source.settings, epsilon)
    show_settings("", source.settings, source.origin, output, resolved=resolved)
    settings = {
        name: {"value": value, "source": source.origin[name]}
        for name, value in source.settings.to_json().items()
    }
    if problem := _early_problem(source):
        check = {"title": "What the run reads", "passed": False, "detail": problem}
        output.say(f"2. ✗ failed: {check['title']}: {problem}")
        unused = unused_in_training(source.settings, source.given, output=None)
        warn_of_unused(unused, output)
        passed, found = False, {"anchors": None, "checks": [check]}
    else:
        passed, found = _rehearse(source, output)
    output.json({"passed": passed, "settings": settings, **found})
    if not passed:
        output.warn("a check failed; craft train would stop here too.")
        raise typer.Exit(EXIT_CHECK_FAILED)
    output.next(after_dryrun(source, own=_OWN_DEFAULTS))


def _early_problem(source: Source[TrainConfig]) -> str | None:
    """A mistake that is found before anything heavy is imported."""
    try:
        check_inputs(source)
    except CraftError as problem:
        return str(problem)
    return None


def _rehearse(source: Source[TrainConfig], output: Output) -> tuple[bool, dict[str, Any]]:
    """Open everything in a temporary folder and take steps: whether it passed, and as JSON."""
    with tempfile.TemporaryDirectory(prefix="craft-dryrun-") as scratch:
        with output.status("Loading ..."):
            quiet_libraries(debug=output.debug)
            from craftcli.engine.dryrun import DryRun

        run = DryRun(
            source.settings,
            cache_given="cache" in source.given,
            scratch=Path(scratch),
            record=lambda config, teacher: record_episodes(config, teacher, output, exact=False),
        )
        passed, checks, steps = _check_and_step(run, source, output)
        return passed, {"anchors": run.anchors, "checks": checks, **steps}


def _check_and_step(
    run: "DryRun", source: Source[TrainConfig], output: Output
) -> tuple[bool, list[dict[str, Any]], dict[str, Any]]:
    """Run the checks, and the steps if all passed: whether they passed, and both as JSON."""
    checks = _run_checks(run, output)
    passed = all(check["passed"] for check in checks)
    predicted = run.output_kind if passed else None
    warn_of_unused(unused_in_training(run.config, source.given, output=predicted), output)
    if not passed:
        return False, checks, {}
    for remark in run.remarks():
        output.warn(remark)
    if out_of_reach := run.out_of_reach():
        output.warn(out_of_reach)
    try:
        return True, checks, _run_steps(run, output)
    except CraftError as problem:
        output.say(f"{len(checks) + 2}. ✗ failed: Steps: {problem}")
        checks.append({"title": "Steps", "passed": False, "detail": str(problem)})
        return False, checks, {}


def _run_checks(run: "DryRun", output: Output) -> list[dict[str, Any]]:
    checks = []
    for number, check in enumerate(run.checks(), start=2):
        mark = "✓" if check.passed else "✗ failed:"
        output.say(f"{number}. {mark} {check.title}: {check.detail}")
        checks.append(asdict(check))
    return checks


def _run_steps(run: "DryRun", output: Output) -> dict[str, Any]:
    from craftcli.engine.metrics import Window, empty_entry

    evaluator = open_training_evaluator(run.run, output)
    if evaluator is not None:
        started = time.perf_counter()
        entry = empty_entry(0, steps=run.config.steps, mode=run.config.mode)
        figures = entry.with_figures(asdict(evaluator()), best=None).measured()
        seconds = time.perf_counter() - started
        output.say(f"Before the first step: {', '.join(figures)}; measured in {seconds:.1f} s")
    window = Window(steps=run.config.steps, mode=run.config.mode)
    reports, entries = [], []
    for report in run.steps(evaluator):
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
