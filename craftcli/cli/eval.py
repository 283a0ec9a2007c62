"""`craft eval`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from craftcli.cli.eval_tables import say_evaluation
from craftcli.cli.options import AsJson, Debug, epilog, guarded, parse_location
from craftcli.cli.output import Output
from craftcli.cli.quiet import quiet_libraries
from craftcli.config import DEMO
from craftcli.errors import EXIT_USAGE, CraftError

if TYPE_CHECKING:
    from craftcli.evaluation.evaluate import Amounts
    from craftcli.evaluation.subject import Plan, Subject


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "eval",
        help="Measure what a policy kept and learned: drift from its teacher, its loss on data, "
        "and its success in simulation. Without --cache, --dataset and --env: all that the run "
        "knows of; with any of them: that alone.",
        epilog=epilog(
            "craft eval runs/hidden",
            "craft eval runs/hidden --cache held_out.zarr --plot drift.png",
            "craft eval runs/hidden --env metaworld:door-open-v3 --episodes 50 --workers 2",
            "craft eval me/my_policy --dataset me/old_task --dataset me/new_task --json",
        ),
    )(evaluate)


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_POLICY",
            help="A run, a checkpoint of one, a LeRobot policy, or demo for the demo's teacher.",
        ),
    ],
    cache: Annotated[
        Any,
        typer.Option(
            parser=parse_location,
            metavar="PATH",
            help="Measure drift on this cache; craft cache build --exclude makes a held-out one.",
        ),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATASET",
            help="Measure the policy's own loss on it: a folder, a Hub name, or demo; repeatable.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Measure success in it: demo, metaworld:TASK, or LeRobot's pusht, aloha:TASK, "
            "libero:SUITE, ...; repeatable.",
        ),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes in each environment.")] = 50,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first episode; each has one more.")
    ] = 1000,
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of an episode. Without it: the environment's own."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Frames of each dataset.")] = 512,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Episodes, frames and anchors that run together.")
    ] = 50,
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that simulate; 0 does it in this one.")
    ] = 0,
    anchor_root: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder of the cache's dataset, if it has moved."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the policy's tokenizers.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, or auto.")] = "auto",
    name: Annotated[
        str, typer.Option(help="A run's result is kept as RUN/evaluations/NAME.json.")
    ] = "evaluation",
    output_file: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to keep it instead."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the drift of each layer.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure what was asked for, say it, and keep it."""

    def act(output: Output) -> None:
        _check_name(name)
        with output.status("Loading ..."):
            quiet_libraries(debug=debug)
            from craftcli.evaluation.evaluate import Amounts
            from craftcli.evaluation.subject import open_subject
            from craftcli.report.drift_plot import check_plot_file
        if plot is not None:
            check_plot_file(plot)
        amounts = Amounts(
            episodes=episodes,
            seed=seed,
            max_steps=max_steps,
            samples=samples,
            batch_size=batch_size,
            workers=workers,
        )
        with output.status(f"Opening {source} ..."):
            subject = open_subject(source, device=device, trust_remote_code=trust_remote_code)
            plan = _plan(subject, cache, dataset or [], env or [])
        _run(
            subject, plan, amounts, output, anchor_root, plot, _kept_in(subject, name, output_file)
        )

    guarded(act, as_json=as_json, debug=debug)


def _run(
    subject: "Subject",
    plan: "Plan",
    amounts: "Amounts",
    output: Output,
    anchor_root: str | None,
    plot: Path | None,
    file: Path | None,
) -> None:
    from craftcli.evaluation.evaluate import evaluate as evaluate_policy
    from craftcli.report.drift_plot import plot_drift

    if plot is not None and plan.cache is None:
        raise CraftError(
            "There is no drift to plot.",
            why="no cache is evaluated on.",
            fix="give one with --cache.",
            exit_code=EXIT_USAGE,
        )
    result = evaluate_policy(subject, plan, amounts, output.progress, anchor_root=anchor_root)
    say_evaluation(result, output)
    if file is not None:
        result.save(file)
        output.note(f"Kept in {file}")
    if plot is not None and result.drift is not None:
        plot_drift([(subject.checkpoint.source, result.drift)], plot)
        output.note(f"Drew {plot}")
    output.json(result.to_json())


def _plan(subject: "Subject", cache: Any, datasets: list[str], environments: list[str]) -> "Plan":
    """What was named; or, if nothing was, all that the run knows of."""
    from craftcli.evaluation.subject import DataSource, Plan, demo_data

    if cache is None and not datasets and not environments:
        plan = subject.plan()
        if plan.cache is None and not plan.datasets and not plan.environments:
            raise CraftError(
                "There is nothing to evaluate on.",
                why=f"{subject.checkpoint.source} is no run, which would know its data.",
                fix="name a --cache, a --dataset or an --env.",
                exit_code=EXIT_USAGE,
            )
        return plan
    sources: list[DataSource] = []
    for name in datasets:
        sources += demo_data() if name == DEMO else [DataSource(repo_id=name)]
    return Plan(cache=cache, datasets=tuple(sources), environments=tuple(environments))


def _kept_in(subject: "Subject", name: str, output_file: Path | None) -> Path | None:
    from craftcli.evaluation.record import FOLDER

    if output_file is not None or subject.home is None:
        return output_file
    return subject.home / FOLDER / f"{name}.json"


def _check_name(name: str) -> None:
    if not name or Path(name).name != name:
        raise CraftError(
            f"--name {name!r} cannot be used.",
            why="it becomes the name of a file.",
            fix="write a word, and --output for another folder.",
            exit_code=EXIT_USAGE,
        )
