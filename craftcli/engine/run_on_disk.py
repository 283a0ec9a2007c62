"""A run on disk while it trains: its folder and lock, its checkpoints, its summary."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.checkpoint_manifest import CheckpointManifest, LogMark
from craftcli.engine.checkpoints import save
from craftcli.engine.dependencies import find_dependencies
from craftcli.engine.execution import Execution
from craftcli.engine.file_digests import file_digest
from craftcli.engine.kept_checkpoints import point_to_best, remove_older
from craftcli.engine.method.constraint import Note
from craftcli.engine.resuming import (
    Resumed,
    changed_error,
    forget_later,
    record_steps,
    require_unmoved,
    set_later_aside,
)
from craftcli.engine.retention.opening import keep_weights, kept_files
from craftcli.engine.retention.retention import Retention
from craftcli.engine.run_folder import CONFIG_FILE, lock_folder, remove_replaced, run_folder
from craftcli.engine.summary import SummaryKeeper, keep_summary
from craftcli.engine.verdict import Verdict
from craftcli.policies.lerobot.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How a run stands after a step."""

    step: int
    skipped: int
    verdict: Verdict
    stopped_early: bool
    best_step: int | None
    """The step of the best checkpoint, in a run that is measured while it trains."""


class RunOnDisk:
    """Opens the folder of a run, and keeps in it what is to last.

    All processes share the folder; the first one writes, the others wait for it.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        *,
        student: Checkpoint,
        dataset: Any,
        retention: Retention | None,
        processes: Processes,
        resumed: Resumed | None,
    ) -> None:
        self.folder = folder
        self.saved: Path | None = resumed.checkpoint if resumed else None
        """The last checkpoint."""
        self.best: Path | None = None
        """The best checkpoint of a run that is measured while it trains."""
        self._config = config
        self._student = student
        self._dataset = dataset
        self._retention = retention
        self._anchors = retention.anchors if retention else None
        self._processes = processes
        self._resumed = resumed
        self._manifest = CheckpointManifest(files={})
        self._summary: SummaryKeeper | None = None

    @contextmanager
    def opened(self, on_note: Callable[[Note], None], *, best_step: int | None) -> Iterator[None]:
        """The folder, locked by the first process: a new one, or that of --resume."""
        if not self._processes.is_first:
            self._processes.wait()
            yield
            return
        with ExitStack() as stack:
            if self._resumed:
                unlocked = lock_folder(self.folder, stack)
                self._return_to(self._resumed, on_note)
                self.best = point_to_best(self.folder, best_step)
            else:
                unlocked = stack.enter_context(
                    run_folder(self.folder, self._description, overwrite=self._config.overwrite)
                )
                self._begin(on_note)
            if unlocked:
                text = f"{self.folder} cannot be locked ({unlocked}): start no second run in it."
                on_note(Note(text=text, is_warning=True))
            self._processes.wait()
            yield

    def start_summary(self) -> None:
        """Start the summary of a new run, or continue that of a resumed one."""
        if self._processes.is_first:
            self._summary = keep_summary(
                self.folder,
                steps=self._config.steps,
                student=self._student,
                dataset=self._dataset,
                anchors=self._anchors,
                steps_done=self._resumed.step if self._resumed else None,
            )

    def save(
        self,
        standing: Standing,
        *,
        state: dict[str, Any],
        log: LogMark | None,
        pipeline: Any,
        execution: Execution,
        optimizer: Any,
        scheduler: Any,
    ) -> Path:
        """Write a checkpoint and what follows from it; every process must call this."""
        self.saved = save(
            self.folder,
            standing.step,
            pipeline=pipeline,
            student=self._student,
            execution=execution,
            optimizer=optimizer,
            scheduler=scheduler,
            description=self._description,
            state=state,
            manifest=replace(self._manifest, log=log, summary=self._summary is not None),
        )
        self._summarise(standing)
        if self._processes.is_first:
            if standing.best_step == standing.step:
                self.best = point_to_best(self.folder, standing.step)
            if self._config.keep_last:
                remove_older(self.folder, keep=self._config.keep_last)
        return self.saved

    def finish(self, standing: Standing) -> None:
        """Complete a run that has taken its last step, now or before it was resumed."""
        if not self._processes.is_first:
            return
        if self._resumed and self._resumed.step == standing.step:
            # Killed after its last checkpoint, before the summary said so.
            self._summarise(standing)
        if 2 * standing.skipped <= standing.step:
            # A run that was mostly skipped is no successor of a good one.
            remove_replaced(self.folder)

    def _summarise(self, standing: Standing) -> None:
        if self._summary:
            self._summary.saved(
                standing.step,
                skipped=standing.skipped,
                verdict=standing.verdict,
                stopped_early=standing.stopped_early,
            )

    @property
    def _description(self) -> str:
        return json.dumps(self._config.to_json(), indent=2)

    def _begin(self, on_note: Callable[[Note], None]) -> None:
        """Write what a new run needs besides its checkpoints."""
        if self._retention:
            keep_weights(self._retention.terms, self.folder)
        self._manifest = self._describe_outside()
        _say_uncovered(self._manifest, on_note)

    def _return_to(self, resumed: Resumed, on_note: Callable[[Note], None]) -> None:
        """Check that nothing has changed, and set aside what belongs to later steps."""
        require_unmoved(resumed)
        before = resumed.manifest()
        self._manifest = self._describe_outside(before)
        if before:
            _say_uncovered(before, on_note)
        changed = before.changed_dependencies(self._manifest.depends) if before else []
        if changed and not resumed.accepts_changes:
            raise changed_error(resumed, "; ".join(changed))
        for text in changed:
            on_note(Note(text=f"--accept-changes: {text}.", is_warning=True))
        aside = set_later_aside(resumed)
        if aside:
            on_note(Note(text=aside))
        forget_later(resumed)
        record_steps(resumed)
        self._manifest = replace(self._manifest, run_files=self._run_files())

    def _describe_outside(self, before: CheckpointManifest | None = None) -> CheckpointManifest:
        """The part of every checkpoint's manifest that no step changes.

        `before` is the manifest of the checkpoint that is resumed.
        """
        return CheckpointManifest(
            files={},
            run_files=self._run_files(),
            depends=find_dependencies(
                self._student,
                self._dataset,
                self._anchors,
                before=before.depends if before else {},
            ),
        )

    def _run_files(self) -> dict[str, str]:
        """Digests of the files of the run that no step changes."""
        kept = [self.folder / CONFIG_FILE, *kept_files(self.folder)]
        return {file.name: file_digest(file) for file in kept}


def _say_uncovered(manifest: CheckpointManifest, on_note: Callable[[Note], None]) -> None:
    for text in manifest.uncovered():
        on_note(Note(text=f"--resume does not notice every change of {text}."))
