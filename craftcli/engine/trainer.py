"""The training loop."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from craftcli.cache.format import DatasetIdentity
from craftcli.cache.processes import Processes
from craftcli.choices import Tracker
from craftcli.config import TrainConfig
from craftcli.engine.execution import Execution
from craftcli.engine.interrupt import interruptible
from craftcli.engine.opening import keep_weights
from craftcli.engine.resuming import Resumed, forget_later
from craftcli.engine.retention import Retention
from craftcli.engine.run_folder import METRICS_FILE, run_folder
from craftcli.engine.saving import restore, save
from craftcli.engine.step import train_step
from craftcli.engine.summary_keeping import SummaryKeeper, keep_summary
from craftcli.errors import CraftError
from craftcli.policies.action_range import describe_out_of_reach
from craftcli.policies.base import Batch
from craftcli.policies.data import TaskBatches, read_rows
from craftcli.policies.identity import dataset_identity
from craftcli.policies.loading import Checkpoint
from craftcli.policies.training import (
    optimizer_and_scheduler,
    pipeline_config,
    read_random_state,
)
from craftcli.report.metrics import LogEntry, MetricsFile, StepReport, Window
from craftcli.report.trackers import RunTracker, TrackedRun, tracking

SKIPS_ALLOWED = 25
"""Steps in a row that may be skipped: float16 needs about 16 to find its scale."""


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
        resumed: Resumed | None = None,
    ) -> None:
        self.config = config
        self.output = output
        self._student = student
        self._retention = retention
        self._dataset = dataset
        self._resumed = resumed
        self._pipeline = pipeline_config(config, student, dataset, output)
        self._window = Window(steps=config.steps, mode=config.mode)
        self._last: StepReport | None = None
        self._tracker_id: str | None = None
        self._summary: SummaryKeeper | None = None
        self._execution: Execution
        self._optimizer: Any
        self._scheduler: Any
        self._batches: TaskBatches

    @property
    def peak_lr(self) -> float:
        """The learning rate of the policy's preset, or the one that replaced it."""
        lr: float = self._pipeline.optimizer.lr
        return lr

    def trains_on(self, anchors: DatasetIdentity) -> bool:
        """Whether anchors came from the same dataset."""
        return dataset_identity(self._dataset, []).fingerprint == anchors.fingerprint

    def out_of_reach(self) -> str | None:
        """Which of the dataset's actions the policy cannot take; None if it can take all."""
        return describe_out_of_reach(self._student, self._dataset)

    def sample_batch(self) -> Batch:
        """A few samples as the policy takes them, to try things out on."""
        rows = list(range(min(self.config.batch_size, len(self._dataset))))
        batch: Batch = self._student.preprocess(read_rows(self._dataset, rows))
        return batch

    def steps(self) -> Iterator[StepReport]:
        """Train, yielding after every step; nothing is written."""
        batches = self._begin()
        done = self._resumed.step if self._resumed else 0
        for step in range(done, self.config.steps):
            waiting = time.perf_counter()
            now = [self._student.preprocess(b) for b in islice(batches, self.config.grad_accum)]
            yield train_step(
                step,
                now,
                policy=self._student.policy,
                execution=self._execution,
                optimizer=self._optimizer,
                scheduler=self._scheduler,
                retention=self._retention,
                clip_norm=self._pipeline.optimizer.grad_clip_norm,
                data_s=time.perf_counter() - waiting,
            )

    def run(
        self,
        on_step: Callable[[int], None],
        on_log: Callable[[LogEntry], None],
        on_note: Callable[[str], None],
    ) -> RunResult:
        """Train, log and save; asked to end, it finishes the step and saves."""
        config, processes = self.config, Processes.from_environment()
        ending = _Ending(config.steps, processes)
        with (
            self._folder(processes),
            closing(MetricsFile(self.output / METRICS_FILE, write=processes.is_first)) as metrics,
            self._tracked(processes) as tracker,
            interruptible() as interrupt,
            self._kept_on_failure(processes),
        ):
            if processes.is_first:
                self._summary = self._begin_summary()
            for report in self.steps():
                self._last = report
                self._window.add(report)
                on_step(report.step)
                for note in report.retention.notes if report.retention else ():
                    on_note(note)
                last = ending.reached(report, asked=interrupt.requested)
                if last or report.step % config.log_every == 0:
                    entry = self._window.flush()
                    metrics.write(entry)
                    tracker.log(entry)
                    on_log(entry)
                if last or (config.save_every and report.step % config.save_every == 0):
                    saved = self._save(report.step)
                if last:
                    break
        self._execution.close()
        if ending.stuck:
            raise _not_finite(report, ending.skipped, saved)
        return RunResult(checkpoint=saved, last=entry, interrupted=report.step < config.steps)

    @contextmanager
    def _folder(self, processes: Processes) -> Iterator[None]:
        """The folder of the run, made or gone on with by the first process."""
        if self._resumed:
            if processes.is_first:
                forget_later(self.output, self._resumed.step)
            processes.wait()
            yield
        elif processes.is_first:
            with run_folder(self.output, self._description, overwrite=self.config.overwrite):
                if self._retention:
                    keep_weights(self._retention, self.output)
                processes.wait()
                yield
        else:
            processes.wait()
            yield

    def _begin_summary(self) -> SummaryKeeper | None:
        return keep_summary(
            self.output,
            steps=self.config.steps,
            student=self._student,
            dataset=self._dataset,
            retention=self._retention,
            resumed=self._resumed is not None,
        )

    @contextmanager
    def _tracked(self, processes: Processes) -> Iterator[RunTracker]:
        """Where entries go besides the file; of several processes the first has a tracker."""
        run = TrackedRun(
            folder=self.output,
            settings=self.config.to_json(),
            resume=self._resumed.state["tracker"] if self._resumed else None,
            done=self._resumed.step if self._resumed else 0,
        )
        kind = self.config.tracker if processes.is_first else Tracker.NONE
        with tracking(kind, run) as tracker:
            self._tracker_id = tracker.id
            yield tracker

    @contextmanager
    def _kept_on_failure(self, processes: Processes) -> Iterator[None]:
        """Save what was learned when a step fails for a reason that can be put right."""
        try:
            yield
        except CraftError as error:
            # With several processes the others are in the middle of theirs.
            if self._last is None or not processes.alone:
                raise
            saved = self._save(self._last.step)
            raise CraftError(
                error.what,
                why=error.why,
                fix=f"{error.fix} Step {self._last.step} is saved: craft train --resume "
                f"{self.output} goes on from {saved.name}.",
                exit_code=error.exit_code,
            ) from error

    def _begin(self) -> Iterator[Batch]:
        """Set everything up to go on from where the run is; the batches to come."""
        config, processes, resumed = self.config, Processes.from_environment(), self._resumed
        policy = self._student.policy
        self._execution = Execution(
            policy, processes=processes, amp=config.amp, parallel=config.parallel
        )
        self._optimizer, self._scheduler = optimizer_and_scheduler(self._pipeline, policy)
        if self._retention:
            self._retention.execution = self._execution
            self._retention.group_by(self._optimizer)
        self._batches = TaskBatches(
            self._dataset,
            batch_size=config.batch_size,
            seed=config.seed,
            workers=config.workers,
            drop_last_frames=getattr(policy.config, "drop_n_last_frames", 0),
            processes=processes,
            position=resumed.state["data"] if resumed else None,
        )
        batches = iter(self._batches)
        torch.manual_seed(config.seed + processes.rank)
        if resumed is None:
            return batches
        restore(
            resumed.checkpoint,
            execution=self._execution,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
        )
        if self._retention:
            self._retention.load_state_dict(resumed.state["retention"])
        self._execution.load_state_dict(resumed.state["execution"])
        self._window.load_state_dict(resumed.state["window"])
        if self._batches.position["start_index"]:
            # Starting on a round draws a random number. The run that was saved had done so.
            batches = chain([next(batches)], batches)
        if resumed.state["world"] == processes.world:
            read_random_state(resumed.checkpoint, processes)
        return batches

    @property
    def _description(self) -> str:
        return json.dumps(self.config.to_json(), indent=2)

    def _save(self, step: int) -> Path:
        state = {
            "step": step,
            "world": self._execution.processes.world,
            "data": self._batches.position,
            "retention": self._retention and self._retention.state_dict(),
            "execution": self._execution.state_dict(),
            "window": self._window.state_dict(),
            "tracker": self._tracker_id,
        }
        saved = save(
            self.output,
            step,
            pipeline=self._pipeline,
            student=self._student,
            execution=self._execution,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            description=self._description,
            state=state,
        )
        if self._summary:
            self._summary.saved(step)
        return saved


class _Ending:
    """Decides, the same in all processes, which step is the last."""

    def __init__(self, steps: int, processes: Processes) -> None:
        self._steps = steps
        self._processes = processes
        self.skipped = 0
        """Steps in a row, up to now."""

    @property
    def stuck(self) -> bool:
        """Whether too many steps in a row were skipped, or all there are."""
        return self.skipped > SKIPS_ALLOWED or self.skipped >= self._steps

    def reached(self, report: StepReport, *, asked: bool) -> bool:
        """Whether to stop after this step; `asked` by a signal to any of the processes."""
        self.skipped = self.skipped + 1 if report.skipped else 0
        return self._processes.total(int(asked)) > 0 or report.step == self._steps or self.stuck


def _not_finite(report: StepReport, skipped: int, saved: Path) -> CraftError:
    values = {"loss": report.loss, "gradient norm": report.grad_norm}
    if report.retention:
        values["L_ret"] = report.retention.loss
    broken = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    return CraftError(
        f"Training stopped at step {report.step}.",
        why=f"{skipped} steps in a row were not finite ({', '.join(broken)}); none of them changed "
        "the weights.",
        fix=f"lower --lr, or check the dataset for NaN; the state is saved in {saved}.",
    )
