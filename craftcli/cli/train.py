"""`craft train`: fine-tune a policy on new data while it is held to its teacher."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from craftcli.choices import Schedule
from craftcli.cli.disk_space import check_checkpoints
from craftcli.cli.early_checks import check_training
from craftcli.cli.next_steps import quote
from craftcli.cli.options import add_settings_command, warn_of_unused
from craftcli.cli.output import Output, size
from craftcli.cli.quiet import quiet_libraries
from craftcli.cli.recording import record_episodes
from craftcli.cli.settings_table import show_settings
from craftcli.cli.verdict import show_verdict
from craftcli.config.settings import Source
from craftcli.config.train import TrainConfig
from craftcli.config.unused import unused_in_training
from craftcli.demo.defaults import DEMO_TRAINING
from craftcli.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from craftcli.cache.build.recorded_rows import RecordedFrames
    from craftcli.config.cache import CacheConfig
    from craftcli.engine.method.constraint import Note
    from craftcli.engine.retention.anchors import NumberedAnchors
    from craftcli.engine.retention.gradient_reach import GradientReach
    from craftcli.engine.retention.terms import RetentionTerms
    from craftcli.engine.run import OpenedRun
    from craftcli.engine.trainer import RunResult
    from craftcli.engine.watch import Evaluator
    from craftcli.policies.lerobot.checkpoint import Checkpoint

MAIN_OPTIONS = (
    "policy",
    "dataset",
    "cache",
    "mode",
    "epsilon_start",
    "steps",
    "batch_size",
    "lr",
    "output",
    "resume",
)
"""The ten options that most users need, in the order of `--help`."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_settings_command(
        app,
        "train",
        TrainConfig,
        train,
        help="Fine-tune the policy on new data while it is held to its teacher.\n\n"
        "Without a cache, the run makes its own anchors. Say what there is of the old tasks: "
        "--old-tasks, --old-dataset or --old-env (under Anchors).",
        examples=(
            "craft train --steps 20",
            "craft train --mode hidden",
            "craft train --mode none --output runs/plain",
            "craft train --policy outputs/my_policy --dataset me/new_task",
            "craft train --policy me/base --dataset me/new_task --old-tasks old_instructions.txt",
            "craft train --policy me/base --dataset me/new_task --old-env metaworld:pick-place-v3",
            "craft train --policy me/base --dataset me/new_task --cache anchors.zarr",
            "craft train --policy me/base --dataset me/new_task --teacher live --lora r=8",
            "craft train --resume runs/plain",
            "craft train --resume runs/plain --steps 20000",
        ),
        main=MAIN_OPTIONS,
        demo=DEMO_TRAINING,
    )


def train(source: Source[TrainConfig], output: Output) -> None:
    """Train and save; under torchrun every process runs this, and the first one prints."""
    from craftcli.distributed import Processes

    check_training(source)
    processes = Processes.from_environment()
    with output.status("Loading ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.demo.datasets import NEW
        from craftcli.engine.ending import mostly_skipped
        from craftcli.engine.run import start_run
        from craftcli.engine.run_folder import released_if_empty
        from craftcli.sources import data_status

    with processes.connected():
        first_output = output.for_first(is_first=processes.is_first)
        given = {n: getattr(source.settings, n) for n, o in source.origin.items() if o == "flag"}
        resume = source.settings.resume
        opening = f"Opening {resume} ..." if resume else data_status(source.settings, NEW)
        with first_output.status(opening):
            opened = start_run(
                source.settings, given, processes, cache_given="cache" in source.given
            )
        note_demo(opened.config.is_demo, first_output)
        with released_if_empty(opened.output):
            result = _run(_open_retention(opened, first_output), source, first_output)
    if result.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if error := mostly_skipped(result.skipped, result.last.steps, result.checkpoint):
        raise error


def note_demo(is_demo: bool, output: Output) -> None:
    """Tell the user when the built-in policy and data are used."""
    if is_demo:
        output.note("Using the built-in demo: its policy and the data of its new task.")


def resolved_retention(config: TrainConfig, default_epsilon: float | None) -> dict[str, Any]:
    """The budget and the number of anchors that follow from the settings, by setting.

    `default_epsilon` is the budget of a run that names none; None if that is not known yet.
    """
    if not config.retains:
        return {}
    anchors = {}
    if config.uses_anchors and config.anchor_batch_size is not None:
        anchors = {"anchor_batch_size": config.anchor_batch_size}
    if config.schedule is Schedule.AUTO:
        return {**anchors, "epsilon_schedule": config.schedule}
    if config.epsilon_start is None and default_epsilon is None:
        return anchors
    return {**anchors, "epsilon_start": config.budget(default_epsilon or 0.0)[0]}


def _run(opened: "OpenedRun", source: Source[TrainConfig], output: Output) -> "RunResult":
    from craftcli.engine.checkpoint_size import checkpoint_bytes

    config = opened.config
    _announce(opened, source, output)
    if opened.terms is not None:
        opened = _prepare_retention(opened, opened.terms, output)
    check_checkpoints(
        opened.output, checkpoint_bytes(opened.student), config, opened.steps_done, output
    )
    trainer = opened.trainer(open_training_evaluator(opened, output))
    if trainer.retention and trainer.retention.follows_earlier_rule:
        output.say("λ moves as in the version of craft that began this run: by η (L_ret - ε)")
    started = time.perf_counter()
    with output.progress(config.steps - opened.steps_done, "steps", "Training") as advance:
        result = trainer.run(
            on_step=lambda _: advance(1),
            on_log=lambda entry: output.say(entry.line()),
            on_note=lambda note: _print_note(note, output),
        )
    seconds = time.perf_counter() - started
    if result.was_finished and result.stopped_early:
        output.say(
            f"The run has stopped early, and its policy is in {result.checkpoint}; --patience 0 "
            "continues it to its last step."
        )
    elif result.was_finished:
        output.say(
            f"The run is finished: all {config.steps} steps are done, and its policy is in "
            f"{result.checkpoint}"
        )
    else:
        output.say(f"Saved {result.checkpoint} after {result.last.step} steps in {seconds:.0f} s")
    show_verdict(result.verdict, output)
    output.json(_summary(opened, result, seconds))
    _warn_of_ending(opened, result, output)
    if not result.interrupted:
        output.next(f"craft eval {quote(opened.output)}")
    return result


def open_training_evaluator(opened: "OpenedRun", output: Output) -> "Evaluator | None":
    """What measures the run while it trains, and say what that is."""
    from craftcli.evaluation.while_training import open_evaluator

    evaluator = open_evaluator(opened)
    if evaluator is not None:
        output.say(f"Measured every {opened.config.eval_every} steps:")
        for sentence in evaluator.about:
            output.say(f"  {sentence}")
    return evaluator


def _warn_of_ending(opened: "OpenedRun", result: "RunResult", output: Output) -> None:
    from craftcli.engine.run_folder import BEST, replaced_run

    steps = opened.config.steps
    if result.stopped_early and not result.was_finished:
        output.say(
            f"Stopped early: {opened.config.patience} measurements in a row were no better than "
            "the best."
        )
    if result.best is not None:
        output.say(
            f"Best checkpoint: {result.best}, also as {result.best.with_name(BEST)}: of those that "
            "kept the old skill, the one that learned most of the new."
        )
    if result.skipped:
        output.warn(f"{result.skipped} of {result.last.step} steps were not finite and skipped.")
    if result.interrupted:
        replaced = replaced_run(opened.output)
        kept = f" The run that it replaces is kept in {replaced} until then." if replaced else ""
        output.warn(
            f"interrupted after step {result.last.step} of {steps}, and saved; "
            f"craft train --resume {opened.output} continues.{kept}"
        )


def _announce(opened: "OpenedRun", source: Source[TrainConfig], output: Output) -> None:
    """Show the settings, and warn of those without effect and of actions out of reach."""
    config = opened.config
    origin = dict.fromkeys(source.origin, "run") if opened.resumed else dict(source.origin)
    if opened.own_anchors:
        origin["cache"] = "made"
    retention = resolved_retention(config, opened.terms.default_epsilon) if opened.terms else {}
    resolved = {"output": opened.output, "lr": f"{opened.peak_lr:g}", **retention}
    show_settings("Configuration", config, origin, output, resolved=resolved)
    output.say(f"Retention mode: {config.mode}")
    if len(config.datasets) > 1:
        output.say(f"Data: {opened.dataset.describe()}")
    for note in opened.notes:
        output.warn(note)
    predicted = opened.student.adapter.output_kind
    warn_of_unused(unused_in_training(config, source.given, output=predicted), output)
    if opened.student.peft is not None:
        trained, whole = opened.student.peft.get_nb_trainable_parameters()
        output.say(f"LoRA weights: {trained:,} of {whole:,} parameters are trained")
    if opened.resumed:
        output.say(f"Resuming after step {opened.resumed.step} of {config.steps}")
        if opened.resumed.planned is not None:
            output.say(_describe_extension(opened.resumed.planned, config.steps))
    else:
        _announce_statistics(opened, output)


def _describe_extension(planned: int, steps: int) -> str:
    """The rule by which schedules continue when --steps has changed."""
    return (
        f"The run was to end after {planned} steps and now ends after {steps}. From here on, the "
        f"learning rate and ε are those that a run of {steps} steps has at the same step; constant "
        "ones, and an ε that was found, stay as they are."
    )


def _announce_statistics(opened: "OpenedRun", output: Output) -> None:
    """Say which statistics normalise the new data if they are not simply the teacher's."""
    choice = opened.statistics
    if choice is not None:
        if choice.changed:
            units = choice.units(opened.student.adapter.output_kind)
            output.say(f"Statistics: {' '.join(choice.sentences())} {units.capitalize()}.")
        for remark in choice.remarks():
            output.warn(remark)
    if out_of_reach := opened.out_of_reach():
        output.warn(out_of_reach)


def _open_retention(opened: "OpenedRun", output: Output) -> "OpenedRun":
    """Open what is retained, and make the anchors first if there is no cache."""
    from craftcli.engine.run import open_run_terms

    if opened.makes_anchors:
        opened = _make_anchors(opened, output)
    return open_run_terms(opened, opened.config.cache) if opened.config.retains else opened


def _make_anchors(opened: "OpenedRun", output: Output) -> "OpenedRun":
    from craftcli.engine.run import plan_own_anchors, with_own_anchors

    plan = plan_own_anchors(opened)
    output.say(f"Anchors: {plan.about}.")
    output.say(f"  {plan.expectation}")

    def record(config: "CacheConfig", teacher: "Checkpoint") -> "RecordedFrames":
        return record_episodes(config, teacher, output, exact=False)

    if plan.config.env:
        # Recording shows its own progress.
        opened = with_own_anchors(opened, plan, on_rows=lambda _: None, record=record)
    else:
        with output.progress(plan.config.rows, "rows", "Anchors") as advance:
            opened = with_own_anchors(opened, plan, on_rows=advance)
    if (own := opened.own_anchors) is not None:
        what = f"{own.cache}: {own.rows} rows, {size(own.size_bytes)}"
        done = f"Reusing {what}." if own.reused else f"Built {what}, in {own.seconds:.0f} s."
        output.say(done)
        if own.invalid:
            output.warn(
                f"{own.invalid} of {own.rows} rows are not finite and will not be trained on."
            )
    return opened


def _anchors_json(opened: "OpenedRun") -> dict[str, Any] | None:
    """Where the anchors came from; None if there are none."""
    from craftcli.engine.retention.live_anchors import LiveAnchors

    if opened.own_anchors is not None:
        return opened.own_anchors.to_json()
    if opened.terms is None or opened.terms.anchors is None:
        return None
    if isinstance(opened.terms.anchors, LiveAnchors):
        return opened.terms.anchors.to_json()
    rows = len(opened.terms.anchors)
    return {"source": "cache", "cache": str(opened.config.cache), "rows": rows}


def _describe_anchors(anchors: "NumberedAnchors", output: Output) -> None:
    from craftcli.engine.retention.live_anchors import LiveAnchors

    if not isinstance(anchors, LiveAnchors):
        held_out = anchors.held_out
        apart = f"; {len(held_out)} more are held out and measured as L_held" if held_out else ""
        output.say(f"anchor cache loaded: {len(anchors)} rows{apart}")
        return
    output.say(f"Anchors: {anchors.plan.about}.")
    output.say(f"  {anchors.plan.expectation}")
    output.say(f"The teacher answers live, to new anchors at every step. It costs {anchors.cost}.")
    if anchors.invalid:
        output.warn(
            f"the teacher is not finite on {anchors.invalid} of the anchors that it was tried on; "
            "such anchors are left out of every batch."
        )


def _print_note(note: "Note", output: Output) -> None:
    if note.is_warning:
        output.warn(note.text)
    else:
        output.say(note.text)


def _summary(opened: "OpenedRun", result: "RunResult", seconds: float) -> dict[str, Any]:
    return {
        "run": str(opened.output),
        "checkpoint": str(result.checkpoint),
        "seconds": seconds,
        "interrupted": result.interrupted,
        "skipped": result.skipped,
        "verdict": result.verdict.to_json(),
        "last": asdict(result.last),
        "stopped_early": result.stopped_early,
        "best": None if result.best is None else str(result.best),
        "anchors": _anchors_json(opened),
        "settings": opened.config.to_json(),
    }


def _prepare_retention(opened: "OpenedRun", terms: "RetentionTerms", output: Output) -> "OpenedRun":
    """Check before the first step that retention has an effect, and show what it holds."""
    from craftcli.engine.run import prepare

    if terms.anchors is not None:
        _describe_anchors(terms.anchors, output)
        if opposing := opened.opposing_anchors(terms.anchors):
            output.warn(
                f"the anchors come from the dataset that is trained on: {opposing} of them show "
                "its frames under their own instructions and hold the policy to its old behaviour "
                "there, which opposes the task. Build the cache from the data of the old task, or "
                "with the old instructions in --prompts."
            )
    prepared = prepare(opened, terms)
    check = prepared.check
    if check is not None and opened.config.other_student:
        output.say(f"L_ret of the other student at the start: {check.drift:.3g} (nmse)")
    elif check is not None:
        output.say(f"L_ret at the teacher's weights: {check.drift:.2g} (0 to rounding)")
    _describe_reach(prepared.run, prepared.reach, output)
    return prepared.run


def _describe_reach(run: "OpenedRun", reach: "GradientReach", output: Output) -> None:
    """Say what retention holds, what is frozen, and warn of what is free."""
    from craftcli.engine.retention.gradient_reach import (
        describe_downstream,
        describe_idle,
        describe_little,
        describe_share,
    )

    frozen = run.froze_downstream
    output.say(f"Retention reaches {describe_share(reach, frozen=frozen)}")
    if idle := describe_idle(reach):
        output.warn(f"{idle}.")
    described = describe_downstream(reach, frozen=frozen)
    if reach.free and not frozen:
        output.warn(f"{described}; --freeze-downstream or --mode hidden+action holds them.")
    elif frozen and run.config.freeze_downstream is None:
        # Nobody asked for it, so that the way out is named.
        output.say(f"{described[0].upper()}{described[1:]}; --no-freeze-downstream trains them")
    else:
        output.say(described[0].upper() + described[1:])
    little = describe_little(reach, frozen=frozen)
    if little and (frozen or not reach.free):
        # What is free was named above with its share.
        output.warn(f"{little}.")
