"""What a training step measured, how it reads as a line, and the file it is kept in."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import IO


@dataclass(frozen=True, kw_only=True)
class RetentionReport:
    """What one retention step measured."""

    loss: float
    """L_ret."""
    lam: float
    """λ with which the gradients of this step were merged."""
    epsilon: float
    dot: float
    cos: float
    conflict: bool
    """Whether the task gradient was projected."""
    violated: bool
    """Whether L_ret was above ε."""


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


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """The steps since the last log line, averaged; λ and ε are those of the last retention turn."""

    step: int
    steps: int
    mode: str
    loss: float
    grad_norm: float
    lr: float
    update_s: float
    data_s: float
    l_ret: float | None = None
    lam: float | None = None
    epsilon: float | None = None
    dot: float | None = None
    cos: float | None = None
    conflict_rate: float | None = None
    violation_rate: float | None = None

    def line(self) -> str:
        """The entry as one line of text."""
        parts = [
            f"Step {self.step}/{self.steps}",
            f"loss={self.loss:.4f}",
            f"grdn={self.grad_norm:.3f}",
            f"lr={self.lr:.1e}",
            f"updt_s={self.update_s:.3f}",
            f"data_s={self.data_s:.3f}",
            f"mode={self.mode}",
        ]
        if self.l_ret is not None:
            parts += [
                f"L_ret={self.l_ret:.3g}",
                f"λ={self.lam:.3f}",
                f"ε={self.epsilon:.3g}",
                f"dot={self.dot:.2e}",
                f"cos={self.cos:+.3f}",
            ]
            if self.conflict_rate:
                parts.append("conflict=✓")
        return " | ".join(parts)


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
        reports, self._reports = self._reports, []

        def mean(value: Callable[[StepReport], float]) -> float:
            return fmean(value(report) for report in reports)

        turns = [report.retention for report in reports if report.retention]
        entry = LogEntry(
            step=reports[-1].step,
            steps=self._steps,
            mode=self._mode,
            loss=mean(lambda r: r.loss),
            grad_norm=mean(lambda r: r.grad_norm),
            lr=reports[-1].lr,
            update_s=mean(lambda r: r.update_s),
            data_s=mean(lambda r: r.data_s),
        )
        if not turns:
            return entry
        return replace(
            entry,
            l_ret=fmean(turn.loss for turn in turns),
            lam=turns[-1].lam,
            epsilon=turns[-1].epsilon,
            dot=fmean(turn.dot for turn in turns),
            cos=fmean(turn.cos for turn in turns),
            conflict_rate=fmean(turn.conflict for turn in turns),
            violation_rate=fmean(turn.violated for turn in turns),
        )


class MetricsFile:
    """metrics.jsonl: one JSON object for every log line, on disk as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, entry: LogEntry) -> None:
        """Append an entry."""
        self._file.write(json.dumps(asdict(entry), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing is written after this."""
        self._file.close()
