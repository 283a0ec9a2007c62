"""A record of how L_ret kept to its budget over a whole run, through every resume."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from craftcli.engine.metrics import RetentionReport, StepReport

WINDOW = 20
"""The most retention turns over which the end of a run is averaged."""
_SHORTEST, _SHARE = 5, 5


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the record keeps of a recent retention turn."""

    used: float | None
    """L_ret / ε; None if no ε above 0 was known."""
    lam: float
    at_maximum: bool
    bounded: bool = False


class BudgetRecord:
    """Counts the retention turns above ε and keeps the last ones; skipped steps do not count."""

    def __init__(self, *, since: int = 0) -> None:
        """`since` is the step after which the record starts.

        It is 0, or the step at which a run of an earlier version, which kept no record, is resumed.
        """
        self.since = since
        self.turns = 0
        """Retention turns with a budget above 0."""
        self.above = 0
        """Those in which a loss was above its ε."""
        self.held: float | None = None
        """The last L_held / ε; None if it was never measured."""
        self._recent: list[Turn] = []

    def add(self, report: StepReport) -> None:
        """Record a step."""
        turn = report.retention
        if turn is None or report.skipped:
            return
        self._recent = [*self._recent, _recent(turn)][-WINDOW:]
        if turn.budget_used is None:
            return
        self.turns += 1
        self.above += turn.violated
        if turn.held_out is not None:
            self.held = turn.held_out / turn.epsilon

    @property
    def used(self) -> float | None:
        """The mean of L_ret / ε at the end; None without any turn.

        The end is the last fifth of the turns, at least 5 and at most 20 of them.
        """
        used = [turn.used for turn in self._recent if turn.used is not None]
        return fmean(used[-max(_SHORTEST, self.turns // _SHARE) :]) if used else None

    @property
    def lam(self) -> float | None:
        """The last λ."""
        return self._recent[-1].lam if self._recent else None

    @property
    def at_maximum(self) -> bool:
        """Whether a λ was at its maximum in the last turn."""
        return bool(self._recent) and self._recent[-1].at_maximum

    @property
    def bounded(self) -> bool:
        """Whether the size of the gradients kept a λ from rising in a fifth of the last turns.

        λ takes some turns to come back to where it was cut.
        """
        count = sum(turn.bounded for turn in self._recent)
        return count > 0 and 5 * count >= len(self._recent)

    @property
    def rising(self) -> bool:
        """Whether λ rose over the last turns."""
        return len(self._recent) > 1 and self._recent[-1].lam > self._recent[0].lam

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {
            "since": self.since,
            "turns": self.turns,
            "above": self.above,
            "held": self.held,
            "recent": [asdict(turn) for turn in self._recent],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.since, self.turns, self.above = state["since"], state["turns"], state["above"]
        self.held = state["held"]
        self._recent = [Turn(**turn) for turn in state["recent"]]

    def __repr__(self) -> str:
        return f"BudgetRecord(turns={self.turns}, above={self.above}, used={self.used})"


def _recent(report: RetentionReport) -> Turn:
    return Turn(
        used=report.budget_used,
        lam=report.lam,
        at_maximum=report.at_maximum,
        bounded=report.bounded,
    )
