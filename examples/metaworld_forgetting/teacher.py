"""A policy that knows the old tasks: a fresh one, trained by craft's own loop."""

import shutil
from pathlib import Path

from beginnings import write_fresh

from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.run import open_run
from craftcli.engine.summary_file import RunSummary
from craftcli.sweeps.progress import Bar


def train_teacher(
    folder: Path,
    family: str,
    data: Path,
    rounds: tuple[tuple[int, float], ...],
    bar: Bar,
    *,
    as_recorded: bool = False,
) -> Path:
    """Train in rounds of (steps, learning rate); a teacher that is there is kept."""
    policy = write_fresh(family, folder / "fresh", [data], seed=0, as_recorded=as_recorded)
    for number, (steps, lr) in enumerate(rounds):
        run = folder / f"teacher-{number}"
        summary = RunSummary.read(run)
        if not (summary and summary.complete):
            shutil.rmtree(run, ignore_errors=True)
            config = TrainConfig(
                mode="none",
                policy=str(policy),
                dataset=str(data),
                output=run,
                steps=steps,
                lr=lr,
                batch_size=64,
                save_every=0,
                log_every=100,
            )
            _train(config, bar)
        policy = run
    return policy


def _train(config: TrainConfig, bar: Bar) -> None:
    trainer = open_run(config, {}, Processes.from_environment()).trainer()
    with bar(config.steps, "steps", "Teacher") as advance:
        result = trainer.run(
            on_step=lambda _: advance(1), on_log=lambda _: None, on_note=lambda _: None
        )
    if result.interrupted:
        raise KeyboardInterrupt
