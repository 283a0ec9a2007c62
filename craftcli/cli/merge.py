"""`craft merge`: interpolate the weights of a student and its teacher."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from craftcli.cli.early_checks import check_policy
from craftcli.cli.next_steps import after_merge
from craftcli.cli.options import AsJson, Debug, add_command, guarded
from craftcli.cli.output import Output
from craftcli.cli.quiet import quiet_libraries
from craftcli.config.policy_and_data import DEMO, REMOTE_CODE_HELP
from craftcli.demo.defaults import is_of_demo
from craftcli.engine.merge_output import check_merge_output
from craftcli.errors import EXIT_USAGE, CraftError

if TYPE_CHECKING:
    from craftcli.engine.interpolated_policy import InterpolationReport


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(
        app,
        "merge",
        merge,
        help="Interpolate the weights of a run and its teacher and write the policy (WiSE-FT). "
        "LoRA weights are folded in.",
        examples=(
            "craft merge runs/lora --alpha 1 -o merged",
            "craft merge runs/plain --alpha 0.5",
            "craft merge runs/plain --alpha 0.7 --group vision_tower=0 --group 'lm_head=0.3'",
            "craft merge me/new_policy --teacher me/old_policy --json",
        ),
    )


def merge(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN_OR_POLICY", help="The student: a run, a folder or a Hub name."),
    ],
    alpha: Annotated[
        float,
        typer.Option(
            min=0, max=1, metavar="X", help="Share of the student: 0 is the teacher, 1 the student."
        ),
    ] = 0.5,
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY", help="The teacher. Default: the policy that the run started from."
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ALPHA",
            help="Another alpha for tensors with NAME in their dotted name, or matching it as a "
            "glob. Repeatable; the last match counts.",
        ),
    ] = None,
    output_path: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FOLDER", help="Folder to write. Default: merged-ALPHA."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a policy that craft merge wrote there.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help=REMOTE_CODE_HELP),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Interpolate the weights of a student and its teacher."""

    def act(output: Output) -> None:
        parts = [_read_group(text) for text in group or ()]
        folder = output_path or Path(f"merged-{alpha:g}")
        check_merge_output(folder, overwrite=overwrite)
        for policy in (source, teacher):
            check_policy(policy or DEMO)
        with output.status("Loading ..."):
            quiet_libraries(debug=debug)
            from craftcli.engine.interpolated_policy import (
                plan_interpolation,
                write_interpolation,
            )
            from craftcli.engine.weight_interpolation import Group

        groups = [Group(pattern=name, alpha=own) for name, own in parts]
        with output.status(f"Opening {source} ..."):
            plan = plan_interpolation(
                source,
                teacher=teacher,
                alpha=alpha,
                groups=groups,
                trust_remote_code=trust_remote_code,
            )
        with output.progress(len(plan.alphas), "tensors", "Interpolating") as advance:
            report = write_interpolation(plan, folder, overwrite=overwrite, on_tensor=advance)
        _show(report, folder, output)
        output.next(after_merge(folder, demo=is_of_demo(plan.student.policy_type)))

    guarded(act, as_json=as_json, debug=debug)


def _show(report: "InterpolationReport", folder: Path, output: Output) -> None:
    if report.adapters_merged:
        output.say("Folded the LoRA weights into the policy's own")
    if report.other_processor:
        output.warn(
            "student and teacher have different processors, so they expect different inputs; "
            "the student's was written."
        )
    for part, count in report.tensors_by_alpha.items():
        output.say(f"{count} tensors at alpha {part}")
    output.say(f"Wrote {folder}: {report.parameters / 1e6:.2f}M parameters")
    output.json(report.to_json())


def _read_group(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        alpha = float(value)
    except ValueError:
        alpha = -1.0
    if not name or not 0 <= alpha <= 1:
        raise CraftError(
            f"--group {text} cannot be used.",
            why="it is not NAME=ALPHA with an alpha from 0 to 1.",
            fix="write it as in --group vision_tower=0.3.",
            exit_code=EXIT_USAGE,
        )
    return name, alpha
