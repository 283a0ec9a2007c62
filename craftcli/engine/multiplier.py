"""The Lagrange multiplier λ of L_ret <= ε and the controller that moves it."""

import math
from collections.abc import Mapping


class Multiplier:
    """λ, moved by a νPI controller on the violation L_ret - ε and clipped to [0, maximum].

    λ <- clip(λ + lr (ki e + kp (ξ - ξ'))) with the violation e, its average ξ = ν ξ' + (1 - ν) e,
    and ξ' the average before. As in Cooper the first step is plain ascent and leaves ξ at 0.
    Without a proportional gain, the default, every step is: gradient ascent with step size lr ki.
    """

    def __init__(
        self,
        *,
        value: float = 1.0,
        lr: float = 0.01,
        maximum: float = 10.0,
        kp: float = 0.0,
        ki: float = 1.0,
        nu: float = 0.0,
    ) -> None:
        if not 0 <= value <= maximum or not math.isfinite(value):
            raise ValueError(f"value must be finite and within 0..{maximum}, got {value}")
        for name, setting in (("lr", lr), ("kp", kp), ("ki", ki)):
            if setting < 0 or not math.isfinite(setting):
                raise ValueError(f"{name} must be finite and not negative, got {setting}")
        if not -1 < nu < 1:
            raise ValueError(f"nu must be finite and between -1 and 1, got {nu}")
        self._value = float(value)
        self._lr = float(lr)
        self._maximum = float(maximum)
        self._kp, self._ki, self._nu = float(kp), float(ki), float(nu)
        self._average: float | None = None

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
        """Move λ by one violation L_ret - ε, clip it, and return it."""
        if not math.isfinite(violation):
            raise ValueError(f"the violation is not finite: {violation}")
        update = violation * self._ki
        if self._kp:
            update += self._proportional(violation)
        self._value = min(max(self._value + self._lr * update, 0.0), self._maximum)
        return self._value

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs; gains, lr and maximum are its own to choose."""
        state = {"value": self._value}
        return state if self._average is None else {**state, "average": self._average}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved λ, clipped to the maximum of this run as a step would."""
        value = float(state["value"])
        if value < 0 or not math.isfinite(value):
            raise ValueError(f"a saved multiplier must be finite and not negative, got {value}")
        # There is none before the first step, nor without a proportional gain.
        average = float(state["average"]) if "average" in state else None
        if average is not None and not math.isfinite(average):
            raise ValueError(f"the average of a saved multiplier must be finite, got {average}")
        self._value = min(value, self._maximum)
        self._average = average

    def __repr__(self) -> str:
        gains = f", kp={self._kp:g}, ki={self._ki:g}, nu={self._nu:g}"
        return (
            f"Multiplier(value={self._value:g}, lr={self._lr:g}, maximum={self._maximum:g}"
            f"{gains if self._kp else ''})"
        )

    def _proportional(self, violation: float) -> float:
        if self._average is None:
            self._average = 0.0
            return 0.0
        change = (1 - self._nu) * (violation - self._average)
        self._average = self._average * self._nu + (1 - self._nu) * violation
        return change * self._kp
