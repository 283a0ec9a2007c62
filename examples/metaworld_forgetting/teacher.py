"""A policy that knows the old tasks: a fresh one, trained by craft's own loop."""

import shutil
from pathlib import Path

from beginnings import write_fresh

from craftcli.cache.processes import Processes
from craftcli.config import TrainConfig
from craftcli.engine.opened import open_run
from craftcli.report.run_summary import RunSummary
from craftcli.sweeps.progress import Bar


def train_teacher(
    folder: Path, family: str, data: Path, rounds: tuple[tuple[int, float], ...], bar: Bar
) -> Path:
    """Train in rounds of (steps, learning rate); a teacher that is there is kept."""
    policy = write_fresh(family, folder / "fresh", data, seed=0)
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
    trainer = open_run(config, {}, Processes.from_environment()).trainer
    with bar(config.steps, "steps") as advance:
        result = trainer.run(
            on_step=lambda _: advance(1), on_log=lambda _: None, on_note=lambda _: None
        )
    if result.interrupted:
        raise KeyboardInterrupt
