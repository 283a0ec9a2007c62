"""`craft merge`."""

from pathlib import Path
from typing import Annotated

import typer

from craftcli.cli.options import AsJson, Debug, epilog, guarded
from craftcli.cli.output import Output
from craftcli.cli.quiet import quiet_libraries
from craftcli.errors import EXIT_USAGE, CraftError


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "merge",
        help="Write a policy whose weights lie between a run's and its teacher's (WiSE-FT).",
        epilog=epilog(
            "craft merge runs/lora --alpha 1 -o merged",
            "craft merge runs/plain --alpha 0.5",
            "craft merge runs/plain --alpha 0.7 --group vision_tower=0 --group 'lm_head=0.3'",
            "craft merge me/new_policy --teacher me/old_policy --json",
        ),
    )(merge)


def merge(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN_OR_POLICY", help="The student: a run, a folder or a Hub name."),
    ],
    alpha: Annotated[
        float,
        typer.Option(min=0, max=1, help="How far to go: 0 is the teacher, 1 the student."),
    ] = 0.5,
    teacher: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="Without it: the policy that the run began with."),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ALPHA",
            help="Another alpha for tensors with NAME in their dotted name, or a glob over it; "
            "can be repeated, and the last that fits counts.",
        ),
    ] = None,
    output_path: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The new folder. Without it: merged-ALPHA."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what craft merge has written there.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run Python code that comes with the policies' tokenizers."
        ),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Merge a student's weights, adapters and all, with its teacher's."""

    def act(output: Output) -> None:
        parts = [_read_group(text) for text in group or ()]
        with output.status("Loading ..."):
            quiet_libraries(debug=debug)
            from craftcli.engine.merged_checkpoint import check_folder, plan_merge, write_merge
            from craftcli.engine.weight_merging import Group

        folder = output_path or Path(f"merged-{alpha:g}")
        check_folder(folder, overwrite=overwrite)
        groups = [Group(pattern=name, alpha=own) for name, own in parts]
        with output.status(f"Opening {source} ..."):
            plan = plan_merge(
                source,
                teacher=teacher,
                alpha=alpha,
                groups=groups,
                trust_remote_code=trust_remote_code,
            )
        with output.progress(len(plan.alphas), "tensors") as advance:
            report = write_merge(plan, folder, overwrite=overwrite, on_tensor=advance)
        if report.adapters_merged:
            output.say("Merged the adapters into the weights")
        if report.other_processor:
            output.warn(
                "the teacher's processor is another, so that the two expect other inputs; the "
                "student's was written."
            )
        for part, count in report.tensors_by_alpha.items():
            output.say(f"{count} tensors at alpha {part}")
        output.say(f"Wrote {folder}: {report.parameters / 1e6:.2f}M parameters")
        output.json(report.to_json())

    guarded(act, as_json=as_json, debug=debug)


def _read_group(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        alpha = float(value)
    except ValueError:
        alpha = -1.0
    if not name or not 0 <= alpha <= 1:
        raise CraftError(
            f"--group {text} cannot be used.",
            why="it is no NAME=ALPHA with an alpha from 0 to 1.",
            fix="write it as in --group vision_tower=0.3.",
            exit_code=EXIT_USAGE,
        )
    return name, alpha
