"""`craft train`."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from craftcli.cli.options import settings_command, warn_of_unused
from craftcli.cli.output import Output
from craftcli.cli.quiet import quiet_libraries
from craftcli.config import TrainConfig
from craftcli.demo.defaults import DEMO_TRAINING
from craftcli.errors import EXIT_INTERRUPTED
from craftcli.settings import Source, option_name
from craftcli.unused import unused_in_training

if TYPE_CHECKING:
    from craftcli.engine.opened import OpenedRun
    from craftcli.engine.retention import Retention
    from craftcli.engine.trainer import RunResult, Trainer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    settings_command(
        app,
        "train",
        TrainConfig,
        help="Fine-tune the policy on new data while it is held to its teacher.",
        examples=(
            "craft train --steps 20",
            "craft train --mode hidden --freeze-downstream",
            "craft train --mode none --output runs/plain",
            "craft train --policy outputs/my_policy --dataset me/new_task --cache anchors.zarr",
            "craft train --resume runs/plain",
        ),
        demo=DEMO_TRAINING,
    )(train)


def train(source: Source[TrainConfig], output: Output) -> None:
    """Train and save; under torchrun every process does this, and the first one speaks."""
    from craftcli.cache.processes import Processes

    processes = Processes.from_environment()
    with output.status("Loading ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.demo.datasets import NEW
        from craftcli.engine.opened import open_run
        from craftcli.engine.session import data_status

    with processes.joined():
        speaker = output.for_first(is_first=processes.is_first)
        given = {n: getattr(source.settings, n) for n, o in source.origin.items() if o == "flag"}
        resume = source.settings.resume
        opening = f"Opening {resume} ..." if resume else data_status(source.settings, NEW)
        with speaker.status(opening):
            opened = open_run(source.settings, given, processes)
        result = _run(opened, source, speaker)
    if result.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _run(opened: "OpenedRun", source: Source[TrainConfig], output: Output) -> "RunResult":
    config, trainer = opened.config, opened.trainer
    say_demo(config.is_demo, output)
    resolved = {"output": str(trainer.output), "lr": f"{trainer.peak_lr:g}"}
    origin = dict.fromkeys(source.origin, "run") if opened.resumed else source.origin
    output.table("Configuration", {**resolved, **shown(config, origin)})
    output.say(f"Retention mode: {config.mode}")
    predicted = opened.student.adapter.output_kind
    warn_of_unused(unused_in_training(config, source.given, output=predicted), output)
    if opened.student.peft is not None:
        trained, whole = opened.student.peft.get_nb_trainable_parameters()
        output.say(f"Adapters: {trained:,} of {whole:,} parameters are trained")
    if opened.resumed:
        output.say(f"Going on from step {opened.resumed.step} of {config.steps}")
    elif out_of_reach := trainer.out_of_reach():
        output.warn(out_of_reach)
    if opened.retention:
        _prepare_retention(opened, opened.retention, output)
    done = opened.resumed.step if opened.resumed else 0
    started = time.perf_counter()
    with output.progress(config.steps - done, "steps") as advance:
        result = trainer.run(
            on_step=lambda _: advance(1),
            on_log=lambda entry: output.say(entry.line()),
            on_note=_noting(output),
        )
    seconds = time.perf_counter() - started
    output.say(f"Saved {result.checkpoint} after {result.last.step} steps in {seconds:.0f} s")
    output.json(_summary(trainer, result, seconds))
    if result.interrupted:
        output.warn(
            f"interrupted after step {result.last.step} of {config.steps}, and saved; "
            f"craft train --resume {trainer.output} goes on."
        )
    return result


def _noting(output: Output) -> Callable[[str], None]:
    return lambda text: output.warn(text) if text.startswith("λ") else output.say(text)


def _summary(trainer: "Trainer", result: "RunResult", seconds: float) -> dict[str, Any]:
    return {
        "run": str(trainer.output),
        "checkpoint": str(result.checkpoint),
        "seconds": seconds,
        "interrupted": result.interrupted,
        "last": asdict(result.last),
        "settings": trainer.config.to_json(),
    }


def _prepare_retention(opened: "OpenedRun", retention: "Retention", output: Output) -> None:
    """Show that the constraint is real before the first step, or stop."""
    from craftcli.engine.preparation import prepare
    from craftcli.engine.reach import describe_downstream, describe_idle

    config = opened.config
    if retention.anchors is not None:
        output.say(f"anchor cache loaded: {len(retention.anchors)} rows")
        if opened.trainer.trains_on(retention.anchors.manifest.dataset):
            output.warn(
                "the anchors were taken from the very dataset that is trained on; they hold the "
                "policy to its old behaviour there. Build the cache from the old task's data."
            )
    prepared = prepare(opened, retention)
    check, reach = prepared.check, prepared.reach
    if check is not None and config.other_student:
        output.say(f"L_ret of the other student at the start: {check.drift:.3g} (nmse)")
    elif check is not None:
        output.say(f"L_ret at the teacher's weights: {check.drift:.2g} (0 to rounding)")
    held, trained = len(reach.retained), len(reach.trainable)
    output.say(f"Retention reaches {held} of {trained} trainable tensors")
    idle = describe_idle(reach)
    if idle:
        output.warn(f"{idle}.")
    described = describe_downstream(reach, frozen=config.freeze_downstream)
    if reach.free and not config.freeze_downstream:
        output.warn(f"{described}; --freeze-downstream or --mode hidden+action holds them.")
    else:
        output.say(described[0].upper() + described[1:])


def say_demo(is_demo: bool, output: Output) -> None:
    """Tell the user that nothing of theirs is used."""
    if is_demo:
        output.note("Using the built-in demo: its policy and the data of its new task.")


def shown(config: TrainConfig, origin: Any) -> dict[str, str]:
    """Every setting, its value and who decided it."""
    values = {**config.to_json(), "epsilon_schedule": config.schedule}
    if config.schedule != "auto":
        values["epsilon_start"], values["epsilon_end"] = config.budget
    return {
        option_name(name)[2:]: f"{value}  ({origin[name]})"
        for name, value in values.items()
        if value is not None
    }
