"""The constraint L_ret <= ε: its budget, its multiplier, and warnings about a stuck multiplier."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from craftcli.engine.method.budget import Budget, warmed_up
from craftcli.engine.method.held_out import HeldOut
from craftcli.engine.method.multiplier import Multiplier, Rule


@dataclass(frozen=True, kw_only=True)
class Note:
    """A message for the user about a retention turn."""

    text: str
    is_warning: bool = False
    """Whether the user should act on it."""


FAR_ABOVE = 30.0
"""L_ret / ε from which on a run warns. With made anchors the first steps of a run that keeps the
skill reach 20 in Meta-World."""


class Constraint:
    """One loss that has to stay below its budget."""

    def __init__(self, multiplier: Multiplier, budget: Budget, *, warmup_turns: int = 0) -> None:
        """`warmup_turns` are the retention turns over which λ comes into force."""
        self._multiplier = multiplier
        self._budget = budget
        self._warmup_turns = warmup_turns
        self._watch = LambdaWatch()
        self._held_out = HeldOut()
        self._violated = True

    def __repr__(self) -> str:
        return f"Constraint({self._multiplier!r}, {self._budget!r})"

    @property
    def lam(self) -> float:
        """The current λ."""
        return self._multiplier.value

    def weight(self, turn: int) -> float:
        """The λ that merges the gradients of a retention turn."""
        return warmed_up(self.lam, turn, turns=self._warmup_turns)

    @property
    def at_maximum(self) -> bool:
        """Whether λ is at its maximum."""
        return self._multiplier.at_maximum

    @property
    def bounded(self) -> bool:
        """Whether the size of the gradients keeps λ from rising."""
        return self._multiplier.bounded

    @property
    def violated(self) -> bool:
        """Whether the loss of the last turn was above ε; before the first turn, too."""
        return self._violated

    @property
    def follows_earlier_rule(self) -> bool:
        """Whether λ moves by the rule of earlier versions, because the run started with it."""
        return self._multiplier.rule is Rule.ABSOLUTE

    def epsilon(self, step: int) -> float:
        """The budget at a step, counted from 0; infinite until an automatic ε is found."""
        return self._budget.at(step)

    def observe_held_out(self, loss: float) -> None:
        """Record the loss on held-out anchors; from now on ε bounds it as well."""
        self._held_out.observe(loss)

    def binding(self, loss: float) -> float:
        """The loss that ε bounds: of this turn's anchors, or of the held-out ones if larger."""
        return self._held_out.binding(loss)

    def update(self, loss: float, step: int, *, gradient_ratio: float | None = None) -> list[Note]:
        """Take the dual step after a retention turn; returns notes for the user.

        λ rises with the violation L_ret / ε - 1, and falls slowly while L_ret is below ε: the
        formulas are in `multiplier.py`, as is the bound by the gradients' ratio.
        """
        epsilon = self.epsilon(step)
        found = self._budget.observe(loss)
        notes = [Note(text=found)] if found else []
        gap = self._held_out.compare(loss, epsilon)
        if gap:
            notes.append(Note(text=gap, is_warning=True))
        loss = self.binding(loss)
        self._violated = loss > epsilon
        if math.isfinite(epsilon):
            self._multiplier.step(loss, epsilon, gradient_ratio=gradient_ratio)
            warning = self._watch.observe(
                self.lam,
                at_maximum=self._multiplier.at_maximum,
                at_zero=self._multiplier.at_zero,
                violated=self._violated,
                far=loss > FAR_ABOVE * epsilon,
            )
            if warning:
                notes.append(Note(text=warning, is_warning=True))
        return notes

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        state = {
            "multiplier": self._multiplier.state_dict(),
            "auto": self._budget.state_dict(),
            "watch": self._watch.state_dict(),
            "violated": self._violated,
        }
        if self._held_out.last is not None:
            state["held_out"] = self._held_out.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._multiplier.load_state_dict(state["multiplier"])
        self._budget.load_state_dict(state["auto"])
        self._watch.load_state_dict(state["watch"])
        # Missing in runs of earlier versions.
        self._violated = state.get("violated", True)
        # Missing without held-out anchors, and in runs of earlier versions.
        if "held_out" in state:
            self._held_out.load_state_dict(state["held_out"])


type _End = Literal["maximum", "zero", "far"]


class LambdaWatch:
    """Warns once when λ stays where it does not help, and again only after it left that place.

    λ at its maximum counts only while L_ret is above ε, and λ at zero only while L_ret is not above
    ε. In the other cases the settings hold λ there, not the run. Anywhere between, λ does not help
    while L_ret stays far above ε.
    """

    def __init__(self, *, patience: int = 100) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1, got {patience}")
        self._patience = patience
        self._end: _End | None = None
        self._turns = 0

    def observe(
        self, lam: float, *, at_maximum: bool, at_zero: bool, violated: bool, far: bool
    ) -> str | None:
        """Record one retention turn; returns a warning at the `patience`-th in a row.

        `far` is whether L_ret is more than `FAR_ABOVE` times ε.
        """
        end: _End | None = None
        if at_maximum and violated:
            end = "maximum"
        elif at_zero and not violated:
            end = "zero"
        elif far:
            end = "far"
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
        if self._end == "far":
            return (
                f"L_ret has been more than {FAR_ABOVE:g} times ε for {self._patience} retention "
                f"turns, with λ at {lam:.2g}: the old skill is being lost. Lower --lr, or use more "
                "anchors a step (--anchor-batch-size)."
            )
        return (
            f"λ is down at {lam:.2g} and L_ret has been below ε for {self._patience} retention "
            "turns: the budget does not bind. Lower --epsilon-start to retain more, or leave it if "
            "the old task is kept."
        )

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {"end": self._end, "turns": self._turns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._end = state["end"]
        self._turns = int(state["turns"])

    def __repr__(self) -> str:
        return f"LambdaWatch(end={self._end}, turns={self._turns}, patience={self._patience})"
