"""Notices a λ that no longer does its work, and says what to change."""

from collections.abc import Mapping
from typing import Any, Literal


class LambdaWatch:
    """Warns once when λ stays at one of its ends, and again only after it left and returned.

    At the maximum counts only while L_ret is above ε, and at zero only while it is not: otherwise λ
    is held there by its settings, not by the run.
    """

    def __init__(self, *, patience: int = 100) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1, got {patience}")
        self._patience = patience
        self._end: Literal["maximum", "zero"] | None = None
        self._turns = 0

    def observe(self, lam: float, *, at_maximum: bool, at_zero: bool, violated: bool) -> str | None:
        """Take in one retention turn; a warning at the turn that makes it long."""
        end: Literal["maximum", "zero"] | None = None
        if at_maximum and violated:
            end = "maximum"
        elif at_zero and not violated:
            end = "zero"
        self._turns = 0 if end is None else self._turns + 1 if end == self._end else 1
        self._end = end
        if self._turns != self._patience:
            return None
        return self._warning(lam)

    def _warning(self, lam: float) -> str:
        if self._end == "maximum":
            return (
                f"λ has been at its maximum of {lam:g} for {self._patience} retention turns and "
                "L_ret is still above ε: the budget is out of reach. Raise --epsilon-start, raise "
                "--lambda-max, or lower --lr."
            )
        return (
            f"λ has been 0 for {self._patience} retention turns and L_ret is below ε all the same: "
            "the budget does not bind. Lower --epsilon-start to retain more, or leave it if "
            "the old task is kept."
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"end": self._end, "turns": self._turns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._end = state["end"]
        self._turns = int(state["turns"])

    def __repr__(self) -> str:
        return f"LambdaWatch(end={self._end}, turns={self._turns}, patience={self._patience})"
