"""`craft eval`: measure what a policy kept of its old skill and learned of the new one."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from craftcli.choices import Schedule
from craftcli.cli.early_checks import check_evaluation
from craftcli.cli.evaluation_report import show_evaluation, warn_of_shared
from craftcli.cli.next_steps import after_eval, quote
from craftcli.cli.options import AsJson, Debug, add_command, guarded, parse_location
from craftcli.cli.output import Output
from craftcli.cli.quiet import quiet_libraries
from craftcli.cli.verdict import show_verdict
from craftcli.config.policy_and_data import DEVICE_HELP, REMOTE_CODE_HELP
from craftcli.errors import EXIT_USAGE, CraftError

if TYPE_CHECKING:
    from collections.abc import Callable

    from craftcli.config.train import TrainConfig
    from craftcli.evaluation.evaluate import Amounts
    from craftcli.evaluation.results import Evaluation
    from craftcli.evaluation.subject import Plan, Subject


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(
        app,
        "eval",
        evaluate,
        help="Measure what a policy kept and learned: its drift from the teacher, its loss on "
        "data, and its success in simulation.\n\nWithout --cache, --dataset and --env, everything "
        "that the run knows is measured; with any of them, only what they name.",
        examples=(
            "craft eval runs/hidden",
            "craft eval runs/hidden --cache held_out.zarr --plot drift.png",
            "craft eval runs/hidden --env metaworld:door-open-v3 --episodes 50 --workers 2",
            "craft eval me/my_policy --dataset me/old_task --dataset me/new_task --json",
        ),
    )


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_POLICY",
            help="A run, one of its checkpoints, a LeRobot policy, or demo for the demo's teacher.",
        ),
    ],
    cache: Annotated[
        Any,
        typer.Option(
            parser=parse_location,
            metavar="PATH",
            help="Measure the drift on this cache. craft cache build --exclude makes a held-out "
            "one.",
        ),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA",
            help="Measure the policy's own loss on this dataset: a folder, a Hub name, or demo. "
            "Repeatable.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENV",
            help="Measure the success in this environment: demo, metaworld:TASK, or LeRobot's "
            "pusht, aloha:TASK, libero:SUITE, ... Repeatable.",
        ),
    ] = None,
    old_dataset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA",
            help="The same for data of an old task, with the teacher's statistics if the run has "
            "both. Repeatable.",
        ),
    ] = None,
    old_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENV",
            help="The same for the environment of an old task, with the teacher's statistics if "
            "the run has both. Repeatable.",
        ),
    ] = None,
    episodes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Episodes in each environment.")
    ] = 50,
    seed: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Seed of the first episode; each next one has the next seed."
        ),
    ] = 1000,
    max_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Most steps in an episode. Default: the environment's own limit.",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Frames to draw from each dataset.")
    ] = 512,
    batch_size: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Episodes, frames and anchors to compute at once."),
    ] = 50,
    workers: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Processes that simulate; 0 simulates in this one."),
    ] = 0,
    anchor_root: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of the anchors' dataset, when it has moved since the cache was built.",
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="The teacher of the cache, for the error of the actions when the cache holds none "
            "of its outputs. Default: the policy that the run started from.",
        ),
    ] = None,
    teacher_success: Annotated[
        bool,
        typer.Option(
            help="Do not measure the teacher of a run. Default: its loss on the same frames, and "
            "its success in the same episodes, once; that result is kept."
        ),
    ] = True,
    trust_remote_code: Annotated[bool, typer.Option(help=REMOTE_CODE_HELP)] = False,
    device: Annotated[str, typer.Option(metavar="DEVICE", help=DEVICE_HELP)] = "auto",
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Save the result of a run as RUN/evaluations/NAME.json, or NAME-2.json, ...: "
            "earlier ones are kept.",
        ),
    ] = "evaluation",
    output_file: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Save the result to this file instead."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the drift of each layer into this PNG file."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Evaluate a policy, print the result and save it."""

    def act(output: Output) -> None:
        _check_name(name)
        check_evaluation(
            source,
            cache=cache,
            datasets={"--dataset": dataset or [], "--old-dataset": old_dataset or []},
            environments=[*(env or []), *(old_env or [])],
            device=device,
        )
        if plot is not None:
            from craftcli.plots.png import check_plot_file

            check_plot_file(plot)
        with output.status("Loading ..."):
            quiet_libraries(debug=debug)
            from craftcli.evaluation.evaluate import Amounts
            from craftcli.evaluation.subject import open_subject
        amounts = Amounts(
            episodes=episodes,
            seed=seed,
            max_steps=max_steps,
            samples=samples,
            batch_size=batch_size,
            workers=workers,
        )
        with output.status(f"Opening {source} ..."):
            subject = open_subject(
                source, device=device, trust_remote_code=trust_remote_code, teacher=teacher
            )
            plan = _plan(
                subject,
                cache,
                datasets={None: dataset or [], "old": old_dataset or []},
                environments=env or [],
                old_environments=old_env or [],
            )
        measure = functools.partial(
            _measure, subject, plan, amounts, anchor_root=anchor_root, with_teacher=teacher_success
        )
        _run(subject, plan, measure, output, plot, _keeping(subject, name, output_file))

    guarded(act, as_json=as_json, debug=debug)


def _measure(
    subject: "Subject",
    plan: "Plan",
    amounts: "Amounts",
    output: Output,
    *,
    anchor_root: str | None,
    with_teacher: bool,
) -> "Evaluation":
    from craftcli.evaluation.evaluate import evaluate_policy

    return evaluate_policy(
        subject,
        plan,
        amounts,
        output.progress,
        anchor_root=anchor_root,
        with_teacher=with_teacher,
    )


def _run(
    subject: "Subject",
    plan: "Plan",
    measure: "Callable[[Output], Evaluation]",
    output: Output,
    plot: Path | None,
    keep: "Callable[[Evaluation], Path | None]",
) -> None:
    from craftcli.plots.drift_plot import plot_drift

    if plot is not None and plan.cache is None:
        raise CraftError(
            "There is no drift to plot.",
            why="drift is measured on a cache, and there is none.",
            fix="give one with --cache.",
            exit_code=EXIT_USAGE,
        )
    if (own := subject.continued_after) is not None:
        output.warn(
            f"lerobot-train has continued this run: craft trained it up to step {own}, and nothing "
            "held the policy to its teacher since. craft eval "
            f"{quote(str(subject.run))}/checkpoints/STEP evaluates an earlier checkpoint."
        )
    if subject.has_two_processors:
        output.note(
            "This run has two sets of statistics: old tasks (--old-env, --old-dataset, anchors) "
            "use the teacher's, all others those of the new task."
        )
    if subject.verdict is not None:
        show_verdict(subject.verdict, output)
    result = measure(output)
    show_evaluation(result, output)
    if result.drift is not None and result.drift.shared_rows and plan.cache is not None:
        warn_of_shared(result.drift, plan.cache.manifest, output)
    file = keep(result)
    if file is not None:
        output.note(f"Saved to {file}")
    if plot is not None and result.drift is not None:
        drifts = [(subject.checkpoint.source, result.drift)]
        budget = (
            None if subject.checkpoint.adapter.weighs_rows else _comparable_budget(subject.config)
        )
        plot_drift(drifts, plot, epsilon=budget)
        output.note(f"Drew {plot}")
    if subject.run is not None:
        output.next(after_eval(subject.run))
    elif file is not None:
        output.next(f"craft compare {quote(file)} RUN ...")
    output.json(result.to_json())


def _comparable_budget(config: "TrainConfig | None") -> float | None:
    """The last ε of a run, if it is a share of the teacher's variance as drift is."""
    if config is None or not (config.retains and config.scale_known):
        return None
    return None if config.schedule is Schedule.AUTO else config.budget()[1]


def _plan(
    subject: "Subject",
    cache: Any,
    *,
    datasets: dict[str | None, list[str]],
    environments: list[str],
    old_environments: list[str],
) -> "Plan":
    """What the options name, or everything that the run knows if they name nothing."""
    from craftcli.cache.reading.reader import CacheReader
    from craftcli.evaluation.subject import Plan
    from craftcli.sources import dataset_sources

    named = (*datasets.values(), environments, old_environments)
    if cache is None and not any(named):
        plan = subject.plan()
        if plan.cache is None and not plan.datasets and not plan.environments:
            raise CraftError(
                "There is nothing to evaluate on.",
                why=f"{subject.checkpoint.source} is not a run, so its data are unknown.",
                fix="name a --cache, a --dataset or an --env.",
                exit_code=EXIT_USAGE,
            )
        return plan
    return Plan(
        cache=None if cache is None else CacheReader.open(cache),
        datasets=tuple(
            replace(source, group=group or source.group)
            for group, names in datasets.items()
            for name in names
            for source in dataset_sources(name)
        ),
        environments=tuple(environments),
        old_environments=tuple(old_environments),
    )


def _keeping(
    subject: "Subject", name: str, output_file: Path | None
) -> "Callable[[Evaluation], Path | None]":
    """What saves the result: to the user's file, or beside the earlier ones of the run."""

    def keep(result: "Evaluation") -> Path | None:
        from craftcli.evaluation.results import EVALUATIONS_FOLDER

        if output_file is not None:
            result.save(output_file)
        elif subject.home is not None:
            return result.keep(subject.home / EVALUATIONS_FOLDER, name)
        return output_file

    return keep


def _check_name(name: str) -> None:
    if not name or Path(name).name != name:
        raise CraftError(
            f"--name {name!r} cannot be used.",
            why="it becomes the name of a file.",
            fix="give a plain name, or --output for another folder.",
            exit_code=EXIT_USAGE,
        )
