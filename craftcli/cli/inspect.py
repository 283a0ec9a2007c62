"""`craft inspect`: show what a run is, where it stands, and whether it is whole."""

from typing import TYPE_CHECKING

import typer

from craftcli.cli.next_steps import after_inspect, quote
from craftcli.cli.options import add_settings_command
from craftcli.cli.output import Output
from craftcli.cli.quiet import quiet_libraries
from craftcli.config.inspect_run import InspectRunConfig
from craftcli.config.settings import Source

if TYPE_CHECKING:
    from craftcli.evaluation.run_check import CheckpointState, DependencyState, RunInspection

_KINDS = {"cache": "Cache", "dataset": "Dataset", "lora_base": "Policy under LoRA"}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_settings_command(
        app,
        "inspect",
        InspectRunConfig,
        inspect,
        help="Show what a run is and where it stands. Check every file of its checkpoints, and "
        "whether the cache and the data that it depends on are still the same.",
        examples=("craft inspect runs/plain", "craft inspect runs/plain --json"),
        config_file=False,
    )


def inspect(source: Source[InspectRunConfig], output: Output) -> None:
    """Show a run; one that is damaged is an error."""
    run = source.settings.run
    if run is None:
        raise AssertionError("the settings refuse this")
    with output.status(f"Checking {run} ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.evaluation.run_check import inspect_run, require_whole

        found = inspect_run(run)
    _show(found, output)
    output.json(found.to_json())
    require_whole(found)
    output.next(after_inspect(found))


def _show(found: "RunInspection", output: Output) -> None:
    settings = {
        name.replace("_", "-"): ", ".join(v) if isinstance(v, list) else v
        for name, v in found.settings.items()
        if v is not None
    }
    budget = {"budget": found.verdict["finding"]} if found.verdict else {}
    output.table(f"Run {found.run}", {"state": _state(found), **budget, **settings})
    if found.checkpoints:
        output.table("Checkpoints", {str(c.step): _checkpoint(c) for c in found.checkpoints})
    if found.depends:
        output.table("Depends on", {_kind(d.kind): _depends(d) for d in found.depends})
    if found.state == "continued":
        _warn_of_lerobot(found, output)
    if found.evaluations:
        shown = {e.file: e.problem or f"of step {e.step}" for e in found.evaluations}
        output.table("Evaluations", shown)
    if found.replaces and found.state == "empty":
        output.say(
            f"The run that it was to replace is kept in {found.replaces}; the next craft train "
            f"--output {found.run} puts it back."
        )
    elif found.replaces:
        output.say(f"An older run is kept in {found.replaces} until this one is finished.")


def _state(found: "RunInspection") -> str:
    of = f" of {found.steps}" if found.steps is not None else ""
    skipped = f"; {found.skipped} steps were not finite" if found.skipped else ""
    if found.state == "running":
        return f"running: {found.writer} writes it; saved up to step {found.step}{of}{skipped}"
    if found.state == "empty":
        return "it has no checkpoint"
    if found.state == "continued":
        return f"lerobot-train continued it from step {found.own_step} to {found.step}"
    return f"{found.state} at step {found.step}{of}{skipped}"


def _warn_of_lerobot(found: "RunInspection", output: Output) -> None:
    run, own = quote(found.run), found.own_step
    output.warn(
        f"lerobot-train trained steps {own} to {found.step}, and nothing held the policy to its "
        f"teacher meanwhile. craft train --resume {run} --from {own} returns to the last "
        f"checkpoint of craft's; --policy {run} starts a new run from the last one."
    )


def _checkpoint(checkpoint: "CheckpointState") -> str:
    if checkpoint.problems:
        text = f"damaged: {'; '.join(checkpoint.problems)}"
    elif checkpoint.by_lerobot:
        text = "not checked: written by lerobot-train"
    elif checkpoint.has_digests:
        text = "whole: all files match their digests"
    else:
        text = "not checked: saved without digests by an earlier version of craft"
    marks = [name for name in ("last", "best") if getattr(checkpoint, f"is_{name}")]
    return f"{text} ({', '.join(marks)})" if marks else text


def _kind(kind: str) -> str:
    """What a dependency is; the second of several datasets is dataset.2."""
    name, _, number = kind.partition(".")
    return f"{_KINDS.get(name, name)} {number}".strip()


def _depends(dependency: "DependencyState") -> str:
    why = f" ({dependency.why})" if dependency.why else ""
    return f"{dependency.state}: {dependency.name}{why}"
