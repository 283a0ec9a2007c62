"""The training loop."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from craftcli.config import TrainConfig
from craftcli.engine.retention import Retention
from craftcli.engine.step import train_step
from craftcli.errors import CraftError
from craftcli.policies.base import Batch
from craftcli.policies.data import task_batches
from craftcli.policies.loading import Checkpoint
from craftcli.policies.training import (
    optimizer_and_scheduler,
    pipeline_config,
    write_checkpoint,
)
from craftcli.report.metrics import LogEntry, MetricsFile, StepReport, Window

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "craft_config.json"
STATE_FILE = "craft_state.json"


class Trainer:
    """Fine-tunes a student on a dataset, under retention if there is any."""

    def __init__(
        self,
        config: TrainConfig,
        student: Checkpoint,
        dataset: Any,
        retention: Retention | None,
        *,
        output: Path,
    ) -> None:
        self.config = config
        self.output = output
        self._student = student
        self._retention = retention
        self._dataset = dataset
        self._pipeline = pipeline_config(config, student, dataset, output)
        self._optimizer, self._scheduler = optimizer_and_scheduler(self._pipeline, student.policy)

    def batches(self) -> Iterator[Batch]:
        """Task batches as the policy takes them, without end."""
        raw = task_batches(
            self._dataset,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            workers=self.config.workers,
            drop_last_frames=getattr(self._student.policy.config, "drop_n_last_frames", 0),
        )
        for batch in raw:
            yield self._student.preprocess(batch)

    def steps(self) -> Iterator[StepReport]:
        """Train, yielding after every step; nothing is written."""
        torch.manual_seed(self.config.seed)
        batches = self.batches()
        for step in range(self.config.steps):
            waiting = time.perf_counter()
            batch = next(batches)
            yield train_step(
                step,
                batch,
                policy=self._student.policy,
                optimizer=self._optimizer,
                scheduler=self._scheduler,
                retention=self._retention,
                clip_norm=self._pipeline.optimizer.grad_clip_norm,
                data_s=time.perf_counter() - waiting,
            )

    def run(self, on_step: Callable[[int], None], on_log: Callable[[LogEntry], None]) -> Path:
        """Train, log and save; the folder of the last checkpoint."""
        config = self.config
        prepare_output(self.output, overwrite=config.overwrite)
        window = Window(steps=config.steps, mode=config.mode)
        saved = self.output
        with MetricsFile(self.output / METRICS_FILE) as metrics:
            for report in self.steps():
                window.add(report)
                on_step(report.step)
                last = report.step == config.steps
                if last or report.step % config.log_every == 0:
                    entry = window.flush()
                    metrics.write(entry)
                    on_log(entry)
                if last or (config.save_every and report.step % config.save_every == 0):
                    saved = self._save(report.step)
        return saved

    def _save(self, step: int) -> Path:
        state = {"step": step, "retention": self._retention and self._retention.state_dict()}
        return write_checkpoint(
            self.output,
            step,
            pipeline=self._pipeline,
            student=self._student,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            extra={
                CONFIG_FILE: json.dumps(self.config.to_json(), indent=2),
                STATE_FILE: json.dumps(state, indent=2),
            },
        )


def default_output(config: TrainConfig) -> Path:
    """Where a run goes when the user named no folder: a new one every time."""
    return config.output or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{config.mode}"


def prepare_output(output: Path, *, overwrite: bool) -> None:
    """Make an empty run folder; replace only what is a run of ours, and only when asked."""
    check_output(output, overwrite=overwrite)
    try:
        if output.is_dir():
            shutil.rmtree(output)
        output.mkdir(parents=True)
    except OSError as error:
        raise CraftError(
            f"Cannot write to {output}.",
            why=f"{error.strerror or error}.",
            fix="choose another folder with --output.",
        ) from error


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that holds something, before any work is done."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / METRICS_FILE).is_file():
        raise CraftError(
            f"{output} is in the way.",
            why="it exists and is no run of craft's, so it is never replaced.",
            fix="choose another folder with --output.",
        )
    if not overwrite:
        raise CraftError(
            f"The run {output} already exists.",
            why="runs are not replaced unasked.",
            fix="choose another folder with --output, or add --overwrite.",
        )
