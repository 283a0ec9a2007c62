"""The measurements of training steps: as reports, as log lines, and as a file."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import IO, Any, Self

from craftcli.engine.checkpoint_manifest import LogDigest, LogMark
from craftcli.engine.method.constraint import Note
from craftcli.engine.method.projection import ProjectionReport
from craftcli.engine.run_folder import METRICS_FILE


@dataclass(frozen=True, kw_only=True)
class RetentionReport:
    """The measurements of one retention turn."""

    loss: float
    """L_ret."""
    lam: float
    """λ that merged the gradients of this step, before any warm-up."""
    epsilon: float
    """Infinite until an automatic ε is found."""
    gradients: ProjectionReport | None
    """The two gradients; None in steps whose one backward pass did not tell them apart."""
    violated: bool
    """Whether a loss was above its ε."""
    losses: Mapping[str, float]
    """The loss of every mode, and of every layer as `hidden.<layer>`."""
    lams: Mapping[str, float]
    """λ of every constraint."""
    held_out: float | None = None
    """L_held, on anchors that are not trained on; None in turns that did not measure it."""
    projected: bool = False
    """Whether the conflicting part of the task gradient was removed."""
    budget_used: float | None = None
    """L_ret / ε, the largest if there are several constraints; None if no ε above 0 is known."""
    at_maximum: bool = False
    """Whether a λ was at its maximum."""
    bounded: bool = False
    """Whether the size of the gradients kept a λ from rising."""
    notes: tuple[Note, ...] = ()
    """Messages for the user."""

    @property
    def dot(self) -> float | None:
        """The inner product of the two gradients, if they were told apart."""
        return self.gradients.dot if self.gradients else None

    @property
    def cos(self) -> float | None:
        """The cosine of the two gradients, if they were told apart."""
        return self.gradients.cos if self.gradients else None

    @property
    def finite(self) -> bool:
        """Whether the losses and, as far as they are known, both gradients are finite."""
        values = [self.loss, 0.0 if self.held_out is None else self.held_out]
        if self.gradients:
            values += [self.gradients.dot, self.gradients.task_norm, self.gradients.ret_norm]
        return all(map(math.isfinite, values))

    def with_notes(self, notes: Iterable[Note]) -> Self:
        """This report with notes for the user."""
        return replace(self, notes=tuple(notes))


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One training step."""

    step: int
    """Counted from 1, as in log lines."""
    loss: float
    grad_norm: float
    lr: float
    update_s: float
    data_s: float
    """Waiting for the task's data, before the update."""
    retention: RetentionReport | None
    """None if this step had no retention turn."""
    anchor_s: float = 0.0
    """Waiting for the inputs of anchors, a part of `update_s`."""
    skipped: bool = False
    """Whether a value was not finite, so that the weights did not change."""


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """The averages of the steps since the last log line; λ and ε are of the last retention turn.

    The gradients are told apart in some steps only: their values are averages over those, or of the
    last one before if there was none since the last line.
    """

    step: int
    steps: int
    mode: str
    loss: float | None
    """None, like the norm, if every step was skipped."""
    grad_norm: float | None
    lr: float
    update_s: float
    data_s: float
    anchor_s: float | None = None
    l_ret: float | None = None
    l_held: float | None = None
    """The loss on held-out anchors, if it was measured since the last log line."""
    lam: float | None = None
    epsilon: float | None = None
    dot: float | None = None
    cos: float | None = None
    gradients_step: int | None = None
    """The last step in which the gradients were told apart; None if they were in every turn."""
    task_norm: float | None = None
    ret_norm: float | None = None
    conflict_rate: float | None = None
    conflict_share: float | None = None
    projection_rate: float | None = None
    violation_rate: float | None = None
    losses: Mapping[str, float] | None = None
    lams: Mapping[str, float] | None = None
    skipped: int = 0
    """Steps that were not finite; no average includes them."""
    eval_old_loss: float | None = None
    """These are measured after the step, with --eval-every; None in all other lines."""
    eval_new_loss: float | None = None
    eval_old_success: float | None = None
    eval_new_success: float | None = None
    eval_best: int | None = None
    """The step of the best measurement so far."""

    def with_figures(self, figures: Mapping[str, float | None], *, best: int | None) -> Self:
        """This entry with what was measured, by the names without eval_."""
        finite: dict[str, Any] = {
            f"eval_{name}": value if value is not None and math.isfinite(value) else None
            for name, value in figures.items()
        }
        return replace(self, eval_best=best, **finite)

    def line(self) -> str:
        """The entry as one line of text."""
        parts = [
            f"Step {self.step}/{self.steps}",
            "loss=-" if self.loss is None else f"loss={self.loss:.4f}",
            "grdn=-" if self.grad_norm is None else f"grdn={self.grad_norm:.3f}",
            f"lr={self.lr:.1e}",
            f"updt_s={self.update_s:.3f}",
            f"data_s={self.data_s:.3f}",
            *([] if self.anchor_s is None else [f"anchor_s={self.anchor_s:.3f}"]),
            f"mode={self.mode}",
        ]
        if self.l_ret is not None:
            parts += [
                f"L_ret={self.l_ret:.3g}",
                *([] if self.l_held is None else [f"L_held={self.l_held:.3g}"]),
                *self._modes(),
                f"λ={self.lam:.3f}",
                f"ε={'auto' if self.epsilon is None else f'{self.epsilon:.3g}'}",
                *self._angle(),
            ]
            if self.conflict_rate:
                parts.append(f"conflict={self.conflict_rate:.0%}")
            if self.projection_rate:
                parts.append(f"projected={self.projection_rate:.0%}")
        if self.skipped:
            parts.append(f"skipped={self.skipped}")
        parts += self.measured()
        return " | ".join(parts)

    def _angle(self) -> list[str]:
        """The inner product and the cosine, and when they were measured if not in every turn."""
        if self.dot is None or self.cos is None:
            return ["dot=-", "cos=-"]
        when = f" (step {self.gradients_step})" if self.gradients_step else ""
        return [f"dot={self.dot:.2e}", f"cos={self.cos:+.3f}{when}"]

    def measured(self) -> list[str]:
        """What was measured after the step."""
        shown = {
            "old": (self.eval_old_loss, ".3g"),
            "new": (self.eval_new_loss, ".4f"),
            "success_old": (self.eval_old_success, ".2f"),
            "success_new": (self.eval_new_success, ".2f"),
        }
        found = [f"eval_{name}={v:{form}}" for name, (v, form) in shown.items() if v is not None]
        return [*found, "best"] if found and self.eval_best == self.step else found

    def _modes(self) -> list[str]:
        """The loss of each mode, if there are several."""
        modes = {name: loss for name, loss in (self.losses or {}).items() if "." not in name}
        return [f"L_{m}={loss:.3g}" for m, loss in modes.items()] if len(modes) > 1 else []


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The gradients of a step that told them apart."""

    step: int
    gradients: ProjectionReport


class Window:
    """Collects the steps between two log lines."""

    def __init__(self, *, steps: int, mode: str) -> None:
        self._steps = steps
        self._mode = mode
        self._reports: list[StepReport] = []
        self._measured: Measurement | None = None
        """The last one before these steps."""

    def add(self, report: StepReport) -> None:
        """Add a step."""
        self._reports.append(report)

    def flush(self) -> LogEntry:
        """The averages of the steps added since the last call.

        Retention values are averaged over the steps with a retention turn, wherever they are in the
        window: a log line shows them even if its own step has no turn.
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
        if not turns:
            return entry
        measured = [
            Measurement(step=r.step, gradients=r.retention.gradients)
            for r in reports
            if r.retention and r.retention.gradients
        ]
        self._measured = measured[-1] if measured else self._measured
        earlier = [self._measured] if self._measured else []
        entry = replace(entry, anchor_s=fmean(r.anchor_s for r in all_reports))
        entry = _with_gradients(_with_retention(entry, turns), measured or earlier)
        return replace(entry, gradients_step=None) if len(measured) == len(turns) else entry

    def state_dict(self) -> dict[str, Any]:
        """The steps since the last log line, for a resumed run."""
        measured = None if self._measured is None else asdict(self._measured)
        return {"reports": [_to_state(report) for report in self._reports], "measured": measured}

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue from saved steps; earlier versions saved the list of them alone."""
        saved: dict[str, Any] = {"reports": state} if isinstance(state, list) else state
        reports, measured = saved["reports"], saved.get("measured")
        self._reports = [_from_state(entry) for entry in reports]
        if measured is not None:
            gradients = ProjectionReport(**measured["gradients"])
            self._measured = Measurement(step=measured["step"], gradients=gradients)


def _to_state(report: StepReport) -> dict[str, Any]:
    state = asdict(report)
    if report.retention:
        # As texts: the notes were shown already, and runs of earlier versions have texts here.
        state["retention"]["notes"] = [note.text for note in report.retention.notes]
    return state


def _from_state(state: dict[str, Any]) -> StepReport:
    if not state["retention"]:
        return StepReport(**state)
    saved = dict(state["retention"])
    saved["notes"] = tuple(Note(text=text) for text in saved["notes"])
    if "gradients" not in saved:
        # Earlier versions told the gradients apart in every turn, and saved their values beside
        # the others.
        saved.pop("conflict")
        names = [field.name for field in fields(ProjectionReport)]
        saved["gradients"] = {name: saved.pop(name) for name in names}
    if saved["gradients"] is not None:
        saved["gradients"] = ProjectionReport(**saved["gradients"])
    return StepReport(**{**state, "retention": RetentionReport(**saved)})


def _with_retention(entry: LogEntry, turns: list[RetentionReport]) -> LogEntry:
    def mean(value: Callable[[RetentionReport], float]) -> float:
        return fmean(map(value, turns))

    last = turns[-1]
    held_out = [turn.held_out for turn in turns if turn.held_out is not None]
    return replace(
        entry,
        l_ret=mean(lambda t: t.loss),
        l_held=fmean(held_out) if held_out else None,
        lam=last.lam,
        epsilon=last.epsilon if math.isfinite(last.epsilon) else None,
        projection_rate=mean(lambda t: t.projected),
        violation_rate=mean(lambda t: t.violated),
        losses={name: fmean(t.losses[name] for t in turns) for name in last.losses},
        lams=last.lams,
    )


def _with_gradients(entry: LogEntry, measured: list[Measurement]) -> LogEntry:
    """The entry with the averages over these measurements."""
    if not measured:
        return entry

    def mean(value: Callable[[ProjectionReport], float]) -> float:
        return fmean(value(one.gradients) for one in measured)

    return replace(
        entry,
        dot=mean(lambda g: g.dot),
        cos=mean(lambda g: g.cos),
        gradients_step=measured[-1].step,
        task_norm=mean(lambda g: g.task_norm),
        ret_norm=mean(lambda g: g.ret_norm),
        conflict_rate=mean(lambda g: g.conflict),
        conflict_share=mean(lambda g: g.conflict_share),
    )


class MetricsFile:
    """metrics.jsonl: one JSON object per log line, flushed at once."""

    def __init__(self, path: Path, *, write: bool = True) -> None:
        """`write` is False in all processes but the first: they write nothing."""
        self._file: IO[bytes] | None = path.open("ab") if write else None
        self._digest = LogDigest(path.read_bytes() if write else b"")

    @property
    def mark(self) -> LogMark:
        """The file as it is now, for the manifest of a checkpoint."""
        return self._digest.mark

    def write(self, entry: LogEntry) -> None:
        """Append an entry."""
        if self._file:
            line = (json.dumps(asdict(entry), allow_nan=False) + "\n").encode()
            self._file.write(line)
            self._file.flush()
            self._digest.add(line)

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


def empty_entry(step: int, *, steps: int, mode: str) -> LogEntry:
    """An entry without the averages of any step."""
    return LogEntry(
        step=step,
        steps=steps,
        mode=mode,
        loss=None,
        grad_norm=None,
        lr=0.0,
        update_s=0.0,
        data_s=0.0,
    )


def last_entry(run: Path, *, steps: int, mode: str) -> LogEntry:
    """The last line of a finished run's log; without values if it cannot be read."""
    try:
        with (run / METRICS_FILE).open("rb") as file:
            # The log of a long run is large; no line has as much as a MiB.
            file.seek(max(file.seek(0, 2) - 2**20, 0))
            return LogEntry(**json.loads(file.read().splitlines()[-1]))
    except (OSError, ValueError, IndexError, TypeError):
        return empty_entry(steps, steps=steps, mode=mode)
