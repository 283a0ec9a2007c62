"""The budget ε(t) of L_ret: a schedule, or a value found in the first steps of the run.

Also the warm-up of λ, the other quantity that follows a plan.
"""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from craftcli.choices import Schedule


def epsilon_at(
    step: int, *, schedule: Schedule, start: float, end: float, total_steps: int
) -> float:
    """ε at a step: `start` at 0, `end` from `total_steps` on, monotone in between.

    A constant ε stays at `start`; an exponential one changes by the same factor every step.
    """
    if schedule is Schedule.EXPONENTIAL and not (start > 0 and end > 0):
        raise ValueError(f"an exponential schedule needs positive bounds, got {start} and {end}")
    if schedule is Schedule.AUTO:
        raise ValueError("an automatic ε depends on the run: AutoEpsilon finds it")
    if schedule is Schedule.CONSTANT:
        return start
    if step >= total_steps:
        return end
    progress = max(step, 0) / total_steps
    match schedule:
        case Schedule.LINEAR:
            value = start + (end - start) * progress
        case Schedule.COSINE:
            value = start + (end - start) * (1 - math.cos(math.pi * progress)) / 2
        case Schedule.EXPONENTIAL:
            value = start * (end / start) ** progress
    # Rounding must not carry ε past either end.
    return min(max(value, min(start, end)), max(start, end))


def warmed_up(lam: float, turn: int, *, turns: int) -> float:
    """The λ that merges the gradients: λ · min(1, (turn + 1) / turns).

    Counts retention turns from 0. λ itself keeps taking its dual steps during the warm-up. With 0
    turns there is no warm-up.

    >>> [warmed_up(2.0, turn, turns=4) for turn in range(5)]
    [0.5, 1.0, 1.5, 2.0, 2.0]
    """
    return lam if turn + 1 >= turns else lam * ((turn + 1) / turns)


class Budget:
    """ε over a run, from a schedule or from the run itself."""

    def __init__(
        self, *, schedule: Schedule, start: float = 0.0, end: float = 0.0, total_steps: int = 1
    ) -> None:
        """`start`, `end` and `total_steps` are those of `epsilon_at`; `auto` uses none of them."""
        self._schedule = schedule
        self._start, self._end = start, end
        self._total_steps = total_steps
        self._auto: AutoEpsilon | None = None

    def at(self, step: int) -> float:
        """ε at a step, counted from 0; infinite until an automatic ε is found."""
        if self._schedule is Schedule.AUTO:
            return math.inf if self._auto is None else self._auto.value
        return epsilon_at(
            step,
            schedule=self._schedule,
            start=self._start,
            end=self._end,
            total_steps=self._total_steps,
        )

    def observe(self, loss: float) -> str | None:
        """Record the L_ret of one retention turn; returns the reason when it fixes ε."""
        if self._schedule is not Schedule.AUTO:
            return None
        if self._auto is None:
            # The first turn comes before the first update: the student still equals its teacher.
            # 1 - cos of equal vectors may be a rounding error below 0.
            self._auto = AutoEpsilon(floor=max(loss, 0.0))
        return self._auto.observe(loss)

    def state_dict(self) -> dict[str, Any] | None:
        """The state that a resumed run needs: None unless ε is automatic."""
        return None if self._auto is None else self._auto.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a saved state."""
        if state is not None:
            self._auto = AutoEpsilon(floor=0.0)
            self._auto.load_state_dict(state)

    def __repr__(self) -> str:
        return f"Budget({self._auto or f'{self._schedule}, {self._start:g} to {self._end:g}'})"


# Smallest rise above the floor that ε allows, as a share of the floor. Cross-entropies and similar
# losses differ by that much between batches of anchors without any forgetting.
_HEADROOM = 0.05


class AutoEpsilon:
    """Measures L_ret over the first retention turns, then fixes ε and gives the reason.

    ε is infinite while it measures, so that λ stays where it is. Then

        ε = max(floor + share · rise, 1.05 · floor, rounding)

    The floor is L_ret at the teacher's weights. The rise is the median of the later half of the
    turns, minus the floor. If ε would be 0, because the floor is 0 and the weights have not moved
    yet, measuring continues over the last `turns` turns.
    """

    def __init__(
        self, *, floor: float, turns: int = 20, share: float = 0.5, rounding: float = 0.0
    ) -> None:
        for name, value in (("floor", floor), ("share", share), ("rounding", rounding)):
            if value < 0 or not math.isfinite(value):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if turns < 1:
            raise ValueError(f"turns must be at least 1, got {turns}")
        self._floor = float(floor)
        self._turns = turns
        self._share = float(share)
        self._rounding = float(rounding)
        self._watched: list[float] = []
        self._value: float | None = None
        self._reason = ""

    @property
    def value(self) -> float:
        """ε; infinite until it is fixed."""
        return math.inf if self._value is None else self._value

    @property
    def fixed(self) -> bool:
        """Whether ε was found."""
        return self._value is not None

    @property
    def reason(self) -> str:
        """The measurements and the rule that gave ε; empty until ε is fixed."""
        return self._reason

    def observe(self, loss: float) -> str | None:
        """Record the L_ret of one retention turn; returns the reason when it fixes ε."""
        if not math.isfinite(loss):
            raise ValueError(f"L_ret is not finite: {loss}")
        if self.fixed:
            return None
        self._watched = [*self._watched, float(loss)][-self._turns :]
        if len(self._watched) < self._turns:
            return None
        later = median(self._watched[len(self._watched) // 2 :])
        candidates = {
            f"{self._share:.0%} of the rise": self._floor
            + self._share * max(later - self._floor, 0),
            f"{_HEADROOM:.0%} above the floor": self._floor * (1 + _HEADROOM),
            "the size of rounding": self._rounding,
        }
        rule = max(candidates, key=lambda name: candidates[name])
        if candidates[rule] == 0:
            return None
        self._value = candidates[rule]
        self._reason = (
            f"ε = {self._value:.3g}: L_ret was {self._floor:.3g} at the teacher's weights (the "
            f"floor) and {later:.3g} in the later half of {self._turns} retention turns without a "
            f"budget; rule: {rule}."
        )
        return self._reason

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs; it can no longer measure the floor."""
        return {
            "floor": self._floor,
            "watched": list(self._watched),
            "value": self._value,
            "reason": self._reason,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._floor = float(state["floor"])
        self._watched = [float(loss) for loss in state["watched"]]
        self._value = None if state["value"] is None else float(state["value"])
        self._reason = str(state["reason"])

    def __repr__(self) -> str:
        seen = f"watched={len(self._watched)}/{self._turns}"
        return f"AutoEpsilon(value={self.value:g}, floor={self._floor:g}, {seen})"
