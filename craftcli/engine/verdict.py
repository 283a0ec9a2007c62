"""The verdict on a run: whether L_ret kept to its budget, and what to change if it did not.

A loss within its budget is not yet a kept skill: the anchors are few, and behaviour shows in closed
loop. So a verdict never says more than "within its budget", and `craft eval` measures the rest.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self


class Outcome(StrEnum):
    """What the figures of a run say about its promise."""

    WITHIN = "within"
    """L_ret ended within its budget, and nothing that is trained is left free."""
    EXCEEDED = "exceeded"
    """L_ret, or L_held, ended above ε."""
    PART_FREE = "part_free"
    """L_ret ended within its budget, but a part of what is trained is held by nothing."""
    FEW_ANCHORS = "few_anchors"
    """L_ret ended within its budget, but on so few frames that a policy learns them by heart."""
    NOTHING_HELD = "nothing_held"
    """Plain fine-tuning."""
    UNKNOWN = "unknown"
    """There is no budget above 0, or there were too few retention steps."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a run kept its promise L_ret <= ε, from its own figures."""

    outcome: Outcome
    step: int
    """The step up to which the run is judged."""
    finding: str
    """What the figures say, in one sentence or two."""
    advice: str | None = None
    """What to change; None if nothing has to."""
    budget_used: float | None = None
    """L_ret / ε at the end, averaged over the last 5 to 20 retention turns."""
    above_share: float | None = None
    """The share of retention turns in which a loss was above its ε."""
    held_out_used: float | None = None
    """The last L_held / ε; None if it was not measured."""
    lam: float | None = None
    lam_at_maximum: bool = False
    lam_bounded: bool = False
    """Whether the size of the gradients kept λ from rising over the last 20 retention turns."""
    lam_rising: bool = False
    """Whether λ rose over the last 20 retention turns."""
    free_share: float = 0.0
    """The share of the trained weights that nothing holds behind the deepest retained layer."""
    anchors: int | None = None
    """How many anchors there were; None if there were none, or if an earlier version judged."""
    turns: int = 0
    since: int = 0
    """The step after which the figures begin; not 0 in a resumed run of an earlier version."""
    skipped: int = 0
    """Steps that were not finite and changed nothing."""

    @property
    def needs_action(self) -> bool:
        """Whether the user should change something."""
        return self.outcome in (Outcome.EXCEEDED, Outcome.PART_FREE, Outcome.FEW_ANCHORS)

    @property
    def text(self) -> str:
        """The finding with the advice."""
        return f"{self.finding} {self.advice}" if self.advice else self.finding

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**{**document, "outcome": Outcome(document["outcome"])})
