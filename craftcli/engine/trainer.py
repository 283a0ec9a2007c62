"""The training loop: steps, log lines, checkpoints, and an orderly end."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from craftcli.choices import Tracker
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.budget_record import BudgetRecord
from craftcli.engine.checkpoints import SaveFailedError, restore, restore_random_state
from craftcli.engine.ending import Ending, explained_disk_errors, interruptible, not_finite
from craftcli.engine.execution import Execution
from craftcli.engine.failed_step import StepStart
from craftcli.engine.judging import AnchorCount, judge
from craftcli.engine.method.constraint import Note
from craftcli.engine.metrics import (
    LogEntry,
    MetricsFile,
    StepReport,
    Window,
    empty_entry,
    last_entry,
)
from craftcli.engine.resuming import Resumed
from craftcli.engine.retention.retention import Retention
from craftcli.engine.retention.terms import RetentionTerms
from craftcli.engine.run_folder import METRICS_FILE
from craftcli.engine.run_on_disk import RunOnDisk, Standing
from craftcli.engine.step import train_step
from craftcli.engine.trackers import RunTracker, TrackedRun, tracking
from craftcli.engine.verdict import Verdict
from craftcli.engine.watch import Evaluator, Watch
from craftcli.errors import CraftError
from craftcli.policies.base import Batch
from craftcli.policies.lerobot.apart_statistics import task_preprocessor
from craftcli.policies.lerobot.batches import TaskBatches
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.training import (
    continue_schedule,
    optimizer_and_scheduler,
    pipeline_config,
)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    checkpoint: Path
    """The last checkpoint."""
    last: LogEntry
    interrupted: bool
    """Whether a signal ended it before its last step."""
    verdict: Verdict
    """Whether L_ret kept to its budget, over all parts of a resumed run."""
    skipped: int = 0
    """Steps that were not finite, over all parts of a resumed run; they changed no weights."""
    was_finished: bool = False
    """Whether a resumed run had taken its last step before; nothing was trained now."""
    stopped_early: bool = False
    """Whether measurements that were no better ended it."""
    best: Path | None = None
    """The best checkpoint of a run that was measured while it trained."""


class Trainer:
    """Fine-tunes a student on a dataset, held by retention terms if there are any.

    Construct it once the policy is ready: parameters that are not trained are frozen, because the
    optimizer and the processes' wrappers are made here. A resumed run continues from the optimizer,
    λ, log window and position of its checkpoint.
    """

    def __init__(
        self,
        config: TrainConfig,
        student: Checkpoint,
        dataset: Any,
        terms: RetentionTerms | None,
        *,
        output: Path,
        resumed: Resumed | None = None,
        processes: Processes | None = None,
        evaluator: Evaluator | None = None,
        froze_downstream: bool = False,
        free_share: float = 0.0,
    ) -> None:
        """`evaluator` measures the student between steps, for a run with --eval-every.

        `froze_downstream` and `free_share` are what `check_reach` in `run.py` did and found.
        """
        policy = student.policy
        self.config = config
        self.output = output
        self.student = student
        self.processes = processes or Processes.from_environment()
        self.execution = Execution(
            policy,
            processes=self.processes,
            amp=config.amp,
            parallel=config.parallel,
            units=student.adapter.shard_units(policy),
        )
        self._pipeline = pipeline_config(config, student, dataset, output)
        self.optimizer, self.scheduler = optimizer_and_scheduler(self._pipeline, policy)
        self.retention: Retention | None = None
        if terms is not None:
            self.retention = Retention(
                terms, policy, config, total_steps=config.steps, execution=self.execution
            )
            self.retention.group_by(self.optimizer)
        self._disk = RunOnDisk(
            output,
            config,
            student=student,
            dataset=dataset,
            retention=self.retention,
            processes=self.processes,
            resumed=resumed,
        )
        self.last_report: StepReport | None = None
        self._dataset = dataset
        self._resumed = resumed
        self._batches = TaskBatches(
            dataset,
            batch_size=config.batch_size,
            seed=config.seed,
            workers=config.workers,
            drop_last_frames=getattr(policy.config, "drop_n_last_frames", 0),
            processes=self.processes,
            position=resumed.state["data"] if resumed else None,
        )
        self._watch = Watch(
            evaluator,
            policy,
            every=config.eval_every,
            patience=config.patience,
            processes=self.processes,
        )
        self._window = Window(steps=config.steps, mode=config.mode)
        self._record = BudgetRecord(since=resumed.step if resumed else 0)
        self._froze_downstream, self._free_share = froze_downstream, free_share
        self._tracker_id: str | None = None
        self._skipped: int = resumed.state.get("skipped", 0) if resumed else 0
        self._metrics: MetricsFile | None = None
        self._step_start: StepStart | None = None
        if resumed:
            self._restore(resumed)

    @property
    def steps_done(self) -> int:
        """Steps that an earlier part of the run has taken."""
        return self._resumed.step if self._resumed else 0

    def steps(self) -> Iterator[StepReport]:
        """Train, and yield the report of every step; writes no files.

        The worker processes that read the data end with it.
        """
        with closing(self._batches):
            batches = self._seeded_batches()
            preprocess = task_preprocessor(self.student, self._dataset)
            for step in range(self.steps_done, self.config.steps):
                waiting = time.perf_counter()
                now = [preprocess(b) for b in islice(batches, self.config.grad_accum)]
                report = train_step(
                    step,
                    now,
                    policy=self.student.policy,
                    execution=self.execution,
                    optimizer=self.optimizer,
                    scheduler=self.scheduler,
                    retention=self.retention,
                    clip_norm=self._pipeline.optimizer.grad_clip_norm,
                    data_s=time.perf_counter() - waiting,
                )
                if self._step_start:
                    self._step_start.keep()
                yield report

    def run(
        self,
        on_step: Callable[[int], None],
        on_log: Callable[[LogEntry], None],
        on_note: Callable[[Note], None],
    ) -> RunResult:
        """Train, log and save; SIGINT or SIGTERM ends the run after the current step.

        A resumed run that had taken its last step is only finished: summary, replaced run.
        """
        config, processes = self.config, self.processes
        ending = Ending(config.steps, processes)
        entry: LogEntry | None = None
        report: StepReport | None = None
        with (
            explained_disk_errors(self.output),
            self._disk.opened(on_note, best_step=self._watch.best_step),
            closing(MetricsFile(self.output / METRICS_FILE, write=processes.is_first)) as metrics,
            self._tracked() as tracker,
            interruptible() as interrupt,
            self._saved_on_failure(),
        ):
            self._metrics = metrics
            self._disk.start_summary()
            if self._watch.active and not self.steps_done:
                self._log(self._first_entry(), metrics, tracker, on_log)
            for report in () if self._watch.exhausted else self.steps():
                self.last_report = report
                self._skipped += report.skipped
                self._window.add(report)
                self._record.add(report)
                on_step(report.step)
                for note in report.retention.notes if report.retention else ():
                    on_note(note)
                last = ending.reached(report, requested=interrupt.requested)
                figures = self._measure(report.step)
                last = last or self._watch.exhausted
                if last or figures or report.step % config.log_every == 0:
                    entry = self._window.flush()
                    if figures:
                        entry = entry.with_figures(figures, best=self._watch.best_step)
                    self._log(entry, metrics, tracker, on_log)
                due = config.save_every and report.step % config.save_every == 0
                if last or due or self._watch.best_step == report.step:
                    self._save(report.step)
                if last:
                    break
            self._finish(report)
        self.execution.close()
        if self._disk.saved is None:
            raise AssertionError("a run without a step is a resumed one")
        if report and ending.stuck:
            raise not_finite(report, ending.skipped, self._disk.saved)
        return RunResult(
            checkpoint=self._disk.saved,
            last=entry or last_entry(self.output, steps=config.steps, mode=config.mode),
            interrupted=report is not None
            and report.step < config.steps
            and not self._watch.exhausted,
            verdict=self._verdict(report.step if report else self.steps_done),
            skipped=self._skipped,
            was_finished=report is None,
            stopped_early=self._stopped_early,
            best=self._disk.best,
        )

    @property
    def _stopped_early(self) -> bool:
        last = self.last_report.step if self.last_report else self.steps_done
        return self._watch.exhausted and last < self.config.steps

    def _log(
        self,
        entry: LogEntry,
        metrics: MetricsFile,
        tracker: RunTracker,
        on_log: Callable[[LogEntry], None],
    ) -> None:
        metrics.write(entry)
        tracker.log(entry)
        on_log(entry)

    def _first_entry(self) -> LogEntry:
        """The figures of the policy before its first step: those of its teacher."""
        entry = empty_entry(0, steps=self.config.steps, mode=self.config.mode)
        return entry.with_figures(asdict(self._watch.measure_start()), best=None)

    def _measure(self, step: int) -> dict[str, float | None]:
        """What is measured after a step; empty in all steps in which nothing is due."""
        if not self._watch.due(step, last=self.config.steps):
            return {}
        # The budget in the end: an early policy must not win because its budget was larger.
        last = self.retention.epsilon(self.config.steps) if self.retention else math.inf
        return asdict(self._watch.measure(step, epsilon=last))

    def _verdict(self, step: int) -> Verdict:
        anchors = self.retention.anchors if self.retention else None
        return judge(
            self._record,
            self.config,
            step=step,
            skipped=self._skipped,
            free_share=self._free_share,
            anchors=AnchorCount.of(anchors.manifest) if anchors else None,
        )

    def _finish(self, report: StepReport | None) -> None:
        """Complete a run that has taken its last step, now or before it was resumed."""
        done = report.step if report else self.steps_done
        if done >= self.config.steps or self._watch.exhausted:
            self._disk.finish(self._standing(done))

    def _standing(self, step: int) -> Standing:
        return Standing(
            step=step,
            skipped=self._skipped,
            verdict=self._verdict(step),
            stopped_early=self._stopped_early,
            best_step=self._watch.best_step,
        )

    def _restore(self, resumed: Resumed) -> None:
        restore(
            resumed.checkpoint,
            execution=self.execution,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
        )
        if resumed.planned is not None:
            continue_schedule(self.scheduler, self.optimizer)
        if self.retention:
            self.retention.load_state_dict(resumed.state["retention"])
        self.execution.load_state_dict(resumed.state["execution"])
        self._window.load_state_dict(resumed.state["window"])
        if "watch" in resumed.state:  # earlier versions measured nothing
            self._watch.load_state_dict(resumed.state["watch"])
        if resumed.planned is not None:
            self._watch.extend()
        # Missing in runs of earlier versions: the record then starts here.
        if "budget_record" in resumed.state:
            self._record.load_state_dict(resumed.state["budget_record"])

    def _seeded_batches(self) -> Iterator[Batch]:
        """The batches to come, with the random generators set for the first of them."""
        batches = iter(self._batches)
        torch.manual_seed((self.config.seed + self.processes.rank) % 2**64)
        if self._resumed is None:
            return batches
        if self._batches.position["start_index"]:
            # The first batch of a round draws a random number; the saved run had drawn it already.
            batches = chain([next(batches)], batches)
        if self._resumed.state["world"] == self.processes.world:
            restore_random_state(self._resumed.checkpoint, self.processes)
        return batches

    @contextmanager
    def _tracked(self) -> Iterator[RunTracker]:
        """The tracker that log entries go to; only the first process has one."""
        run = TrackedRun(
            folder=self.output,
            settings=self.config.to_json(),
            resume=self._resumed.state["tracker"] if self._resumed else None,
            done=self.steps_done,
        )
        kind = self.config.tracker if self.processes.is_first else Tracker.NONE
        with tracking(kind, run) as tracker:
            self._tracker_id = tracker.id
            yield tracker

    @contextmanager
    def _saved_on_failure(self) -> Iterator[None]:
        """Save a checkpoint when a step fails with an error that the user can fix."""
        if self.processes.alone:
            self._step_start = StepStart(self.student.policy, lambda: self._batches.position)
        try:
            yield
        except CraftError as error:
            # Saving needs all processes, and the others are still in the middle of a step.
            if self.last_report is None or self._step_start is None:
                raise
            if isinstance(error, SaveFailedError):
                raise
            step = self.last_report.step
            self._step_start.put_back()
            saved = self._save(step)
            raise CraftError(
                error.what,
                why=error.why,
                fix=f"{error.fix} Step {step} is saved: craft train --resume {self.output} "
                f"continues from {saved.name}.",
                exit_code=error.exit_code,
            ) from error

    def _save(self, step: int) -> Path:
        state = {
            "step": step,
            "world": self.processes.world,
            "data": self._step_start.position if self._step_start else self._batches.position,
            "retention": self.retention and self.retention.state_dict(),
            "execution": self.execution.state_dict(),
            "window": self._window.state_dict(),
            "tracker": self._tracker_id,
            "skipped": self._skipped,
            "watch": self._watch.state_dict(),
            "froze_downstream": self._froze_downstream,
            "weighs_rows": self.retention is None or self.retention.terms.weighs_rows,
            "budget_record": self._record.state_dict(),
            "verdict": self._verdict(step).to_json(),
        }
        return self._disk.save(
            self._standing(step),
            state=state,
            log=self._metrics.mark if self._metrics else None,
            pipeline=self._pipeline,
            execution=self.execution,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
        )
