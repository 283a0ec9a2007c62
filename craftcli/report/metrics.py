"""What a training step measured, how it reads as a line, and the file it is kept in."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import IO, Any, Self


@dataclass(frozen=True, kw_only=True)
class RetentionReport:
    """What one retention step measured."""

    loss: float
    """L_ret."""
    lam: float
    """λ with which the gradients of this step were merged."""
    epsilon: float
    """Infinite while it is still being found."""
    dot: float
    cos: float
    task_norm: float
    ret_norm: float
    conflict: bool
    """Whether the task gradient undid retention beyond the threshold."""
    conflict_share: float
    """The share of parameter groups that were in conflict."""
    violated: bool
    """Whether a loss was above its ε."""
    losses: Mapping[str, float]
    """The loss of every mode, and of what it is made of."""
    lams: Mapping[str, float]
    """λ of every constraint."""
    projected: bool = False
    """Whether that part of the task gradient was removed."""
    notes: tuple[str, ...] = ()
    """What the user should be told."""

    @property
    def finite(self) -> bool:
        """Whether the losses and both gradients are numbers."""
        return all(map(math.isfinite, (self.loss, self.dot, self.task_norm, self.ret_norm)))

    def saying(self, notes: Iterable[str]) -> Self:
        """The same report with notes."""
        return replace(self, notes=tuple(notes))


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One training step."""

    step: int
    """Counted from 1, as it is shown."""
    loss: float
    grad_norm: float
    lr: float
    update_s: float
    data_s: float
    retention: RetentionReport | None
    """None when this step had no retention turn."""
    skipped: bool = False
    """Whether something was not finite, so that the weights were left alone."""


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """The steps since the last log line, averaged; λ and ε are those of the last retention turn."""

    step: int
    steps: int
    mode: str
    loss: float | None
    """None, as the norm, when every step was skipped."""
    grad_norm: float | None
    lr: float
    update_s: float
    data_s: float
    l_ret: float | None = None
    lam: float | None = None
    epsilon: float | None = None
    dot: float | None = None
    cos: float | None = None
    task_norm: float | None = None
    ret_norm: float | None = None
    conflict_rate: float | None = None
    conflict_share: float | None = None
    projection_rate: float | None = None
    violation_rate: float | None = None
    losses: Mapping[str, float] | None = None
    lams: Mapping[str, float] | None = None
    skipped: int = 0
    """Steps in which something was not finite; they are in no average."""

    def line(self) -> str:
        """The entry as one line of text."""
        parts = [
            f"Step {self.step}/{self.steps}",
            "loss=-" if self.loss is None else f"loss={self.loss:.4f}",
            "grdn=-" if self.grad_norm is None else f"grdn={self.grad_norm:.3f}",
            f"lr={self.lr:.1e}",
            f"updt_s={self.update_s:.3f}",
            f"data_s={self.data_s:.3f}",
            f"mode={self.mode}",
        ]
        if self.l_ret is not None:
            parts += [
                f"L_ret={self.l_ret:.3g}",
                *self._modes(),
                f"λ={self.lam:.3f}",
                f"ε={'auto' if self.epsilon is None else f'{self.epsilon:.3g}'}",
                f"dot={self.dot:.2e}",
                f"cos={self.cos:+.3f}",
            ]
            if self.conflict_rate:
                parts.append("conflict=✓")
            if self.projection_rate:
                parts.append("projected=✓")
        if self.skipped:
            parts.append(f"skipped={self.skipped}")
        return " | ".join(parts)

    def _modes(self) -> list[str]:
        """The losses of several modes, one by one."""
        modes = {name: loss for name, loss in (self.losses or {}).items() if "." not in name}
        return [f"L_{m}={loss:.3g}" for m, loss in modes.items()] if len(modes) > 1 else []


class Window:
    """Collects steps between two log lines."""

    def __init__(self, *, steps: int, mode: str) -> None:
        self._steps = steps
        self._mode = mode
        self._reports: list[StepReport] = []

    def add(self, report: StepReport) -> None:
        """Remember a step."""
        self._reports.append(report)

    def flush(self) -> LogEntry:
        """The average of what was added since the last call.

        Retention figures are averaged over the steps that had a turn, wherever in the window they
        were, so that a log interval that never meets the cadence still shows them.
        """
        all_reports, self._reports = self._reports, []
        reports = [report for report in all_reports if not report.skipped]

        def mean(value: Callable[[StepReport], float]) -> float | None:
            return fmean(map(value, reports)) if reports else None

        entry = LogEntry(
            step=all_reports[-1].step,
            steps=self._steps,
            mode=self._mode,
            loss=mean(lambda r: r.loss),
            grad_norm=mean(lambda r: r.grad_norm),
            lr=all_reports[-1].lr,
            update_s=fmean(r.update_s for r in all_reports),
            data_s=fmean(r.data_s for r in all_reports),
            skipped=len(all_reports) - len(reports),
        )
        turns = [report.retention for report in reports if report.retention]
        return _with_retention(entry, turns) if turns else entry

    def state_dict(self) -> list[dict[str, Any]]:
        """The steps since the last log line, for a run that goes on from here."""
        return [asdict(report) for report in self._reports]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Continue from saved steps."""
        self._reports = [
            StepReport(
                **{
                    **entry,
                    "retention": entry["retention"] and RetentionReport(**entry["retention"]),
                }
            )
            for entry in state
        ]


def _with_retention(entry: LogEntry, turns: list[RetentionReport]) -> LogEntry:
    def mean(value: Callable[[RetentionReport], float]) -> float:
        return fmean(map(value, turns))

    last = turns[-1]
    return replace(
        entry,
        l_ret=mean(lambda t: t.loss),
        lam=last.lam,
        epsilon=last.epsilon if math.isfinite(last.epsilon) else None,
        dot=mean(lambda t: t.dot),
        cos=mean(lambda t: t.cos),
        task_norm=mean(lambda t: t.task_norm),
        ret_norm=mean(lambda t: t.ret_norm),
        conflict_rate=mean(lambda t: t.conflict),
        conflict_share=mean(lambda t: t.conflict_share),
        projection_rate=mean(lambda t: t.projected),
        violation_rate=mean(lambda t: t.violated),
        losses={name: fmean(t.losses[name] for t in turns) for name in last.losses},
        lams=last.lams,
    )


class MetricsFile:
    """metrics.jsonl: one JSON object for every log line, on disk as soon as it is written."""

    def __init__(self, path: Path, *, write: bool = True) -> None:
        """Without `write` nothing happens: of several processes one keeps the file."""
        self._file: IO[str] | None = path.open("a", encoding="utf-8") if write else None

    def write(self, entry: LogEntry) -> None:
        """Append an entry."""
        if self._file:
            self._file.write(json.dumps(asdict(entry), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Nothing is written after this."""
        if self._file:
            self._file.close()
