"""The dual side of the constraint: the bound ε(t) and the multiplier λ."""

import math
from collections.abc import Mapping

from craftcli.choices import Schedule


def epsilon_at(
    step: int, *, schedule: Schedule, start: float, end: float, total_steps: int
) -> float:
    """The bound at a step: `start` at 0, `end` from `total_steps` on, monotone in between.

    A constant bound stays at `start`; an exponential one changes by the same factor every step.
    """
    if schedule is Schedule.EXPONENTIAL and not (start > 0 and end > 0):
        raise ValueError(f"an exponential schedule needs positive bounds, got {start} and {end}")
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
    # Rounding may not carry the bound past either end.
    return min(max(value, min(start, end)), max(start, end))


class Multiplier:
    """The Lagrange multiplier λ of L_ret <= ε: ascent on the violation, clipped to [0, maximum]."""

    def __init__(self, *, value: float = 1.0, lr: float = 0.01, maximum: float = 10.0) -> None:
        if not 0 <= value <= maximum or not math.isfinite(value):
            raise ValueError(f"value must be finite and within 0..{maximum}, got {value}")
        if lr < 0 or not math.isfinite(lr):
            raise ValueError(f"lr must be finite and not negative, got {lr}")
        self._value = float(value)
        self._lr = float(lr)
        self._maximum = float(maximum)

    @property
    def value(self) -> float:
        """The multiplier now."""
        return self._value

    @property
    def at_maximum(self) -> bool:
        """Whether λ is pinned at its maximum: ε may be out of reach."""
        return self._value >= self._maximum

    @property
    def at_zero(self) -> bool:
        """Whether λ is 0: the constraint holds with room to spare, and does nothing."""
        return self._value <= 0.0

    def step(self, violation: float) -> float:
        """Move λ by lr times the violation L_ret - ε, clip it, and return it."""
        if not math.isfinite(violation):
            raise ValueError(f"the violation is not finite: {violation}")
        self._value = min(max(self._value + self._lr * violation, 0.0), self._maximum)
        return self._value

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs; lr and maximum are its own to choose."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved λ, clipped to the maximum of this run as a step would."""
        value = float(state["value"])
        if value < 0 or not math.isfinite(value):
            raise ValueError(f"a saved multiplier must be finite and not negative, got {value}")
        self._value = min(value, self._maximum)

    def __repr__(self) -> str:
        return f"Multiplier(value={self._value:g}, lr={self._lr:g}, maximum={self._maximum:g})"
