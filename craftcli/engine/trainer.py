"""The training loop."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from craftcli.cache.format import DatasetIdentity
from craftcli.config import TrainConfig
from craftcli.engine.interrupt import interruptible
from craftcli.engine.retention import Retention
from craftcli.engine.run_folder import CONFIG_FILE, METRICS_FILE, STATE_FILE, run_folder
from craftcli.engine.step import train_step
from craftcli.policies.base import Batch
from craftcli.policies.data import read_rows, task_batches
from craftcli.policies.identity import dataset_identity
from craftcli.policies.loading import Checkpoint
from craftcli.policies.training import (
    optimizer_and_scheduler,
    pipeline_config,
    write_checkpoint,
)
from craftcli.report.metrics import LogEntry, MetricsFile, StepReport, Window


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    checkpoint: Path
    """The last one saved."""
    last: LogEntry
    interrupted: bool
    """Whether it was asked to end before its last step."""


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

    @property
    def peak_lr(self) -> float:
        """The learning rate of the policy's preset, or the one that replaced it."""
        lr: float = self._pipeline.optimizer.lr
        return lr

    def trains_on(self, anchors: DatasetIdentity) -> bool:
        """Whether anchors came from the same dataset."""
        return dataset_identity(self._dataset, []).fingerprint == anchors.fingerprint

    def sample_batch(self) -> Batch:
        """A few samples as the policy takes them, to try things out on."""
        rows = list(range(min(self.config.batch_size, len(self._dataset))))
        batch: Batch = self._student.preprocess(read_rows(self._dataset, rows))
        return batch

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

    def run(self, on_step: Callable[[int], None], on_log: Callable[[LogEntry], None]) -> RunResult:
        """Train, log and save; asked to end, it finishes the step and saves."""
        config = self.config
        window = Window(steps=config.steps, mode=config.mode)
        description = json.dumps(config.to_json(), indent=2)
        with (
            run_folder(self.output, description, overwrite=config.overwrite),
            closing(MetricsFile(self.output / METRICS_FILE)) as metrics,
            interruptible() as interrupt,
        ):
            for report in self.steps():
                window.add(report)
                on_step(report.step)
                last = report.step == config.steps or interrupt.requested
                if last or report.step % config.log_every == 0:
                    entry = window.flush()
                    metrics.write(entry)
                    on_log(entry)
                if last or (config.save_every and report.step % config.save_every == 0):
                    saved = self._save(report.step, description)
                if last:
                    break
        return RunResult(checkpoint=saved, last=entry, interrupted=report.step < config.steps)

    def _save(self, step: int, description: str) -> Path:
        state = {"step": step, "retention": self._retention and self._retention.state_dict()}
        return write_checkpoint(
            self.output,
            step,
            pipeline=self._pipeline,
            student=self._student,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            extra={CONFIG_FILE: description, STATE_FILE: json.dumps(state, indent=2)},
        )
