"""The Lagrange multiplier λ of L_ret <= ε and its update.

The constraint is taken in units of its budget, L_ret / ε - 1 <= 0, so that the step of λ means the
same for every ε. A retention turn has the violation

    v = clip(L_ret / ε - 1, -1, 50)       (for ε = 0: 50 if L_ret > 0, else 0)

and dual ascent (the default) moves λ, the weight of the retention gradient, by

    λ <- min(λ + lr · v, λ_max)           while L_ret > ε
    1/λ <- 1/λ + lr · |v|                 while L_ret <= ε

Both signs move λ to the same place: it rests where L_ret = ε, or falls towards 0. The rise follows
the size of the violation: at 50 times the budget λ goes from 1 to 10 in 9 turns of the default lr,
at twice the budget in 450. While the budget holds, 1/λ, the weight of the task against retention,
grows instead: from λ = 10 to 1 in 45 turns, and from 1 by lr a turn.

Whenever the two gradients were told apart, a λ above 1 is also bounded by their size:

    λ <- min(λ, max(1, BALANCE · |g_task| / |g_ret|))

The gradient of a few anchors is mostly noise. While that noise keeps L_ret above ε, a larger λ does
not lower L_ret, but Adam divides the step by the size of the gradient, so that the task is learned
more slowly (measured: examples/metaworld_forgetting/README.md, "How the defaults were chosen").

νPI (Sohrabi et al., On PI Controllers for Updating Lagrange Multipliers in Constrained
Optimization, 2024, arXiv 2406.04558; `nupi_optimizer.py` in Cooper) adds a proportional part, which
moves λ by lr · kp · (ξ - ξ') in both directions:

    ξ <- ν ξ' + (1 - ν) v                 (average of the violations)

As in Cooper, the first νPI step is plain ascent and leaves ξ at 0.

A turn that stands for K training steps (--retention-every K) takes a step K times as large, at most
as large as the largest one of K = 1 upwards: λ then moves as fast in training steps.

Runs of earlier versions moved λ by lr · (L_ret - ε) in both directions (`Rule.ABSOLUTE`), or had no
such bound (`Rule.RELATIVE`); when they are resumed they still do.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

LARGEST_VIOLATION = 50.0
"""The violation from which on λ grows no faster."""
BALANCE = 2.0
"""How many times the task's gradient the gradient of retention may be, weighted by a λ above 1."""
NEARLY_ZERO = 0.1
"""λ below this gives retention hardly any weight."""


class Rule(StrEnum):
    """What a step of λ is proportional to."""

    BALANCED = "balanced"
    """The violation in units of ε; λ is bounded by the size of the gradients."""
    RELATIVE = "relative"
    """The same without that bound, as in runs of earlier versions."""
    ABSOLUTE = "absolute"
    """L_ret - ε, as in runs of earlier versions."""


def relative_violation(loss: float, epsilon: float) -> float:
    """The violation of L_ret <= ε in units of ε, within -1 and 50.

    >>> [relative_violation(loss, 0.02) for loss in (0.0, 0.02, 0.06, 9.0)]
    [-1.0, 0.0, 2.0, 50.0]
    """
    if epsilon <= 0:
        return LARGEST_VIOLATION if loss > 0 else 0.0
    return min(max(loss / epsilon - 1, -1.0), LARGEST_VIOLATION)


class Multiplier:
    """λ, updated by dual ascent, or by νPI if it has a proportional gain `kp`."""

    def __init__(
        self,
        *,
        value: float = 1.0,
        lr: float = 0.02,
        maximum: float = 10.0,
        kp: float = 0.0,
        ki: float = 1.0,
        nu: float = 0.0,
        every: int = 1,
        rule: Rule = Rule.BALANCED,
    ) -> None:
        """`every` is the number of training steps that a turn stands for."""
        if not 0 <= value <= maximum or not math.isfinite(value):
            raise ValueError(f"value must be finite and within 0..{maximum}, got {value}")
        for name, setting in (("lr", lr), ("kp", kp), ("ki", ki)):
            if setting < 0 or not math.isfinite(setting):
                raise ValueError(f"{name} must be finite and not negative, got {setting}")
        if not -1 < nu < 1:
            raise ValueError(f"nu must be finite and between -1 and 1, got {nu}")
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._value = float(value)
        self._lr = float(lr)
        self._maximum = float(maximum)
        self._kp, self._ki, self._nu = float(kp), float(ki), float(nu)
        self._every = every
        self._rule = rule
        self._average: float | None = None
        self._bounded = False

    @property
    def value(self) -> float:
        """The current λ."""
        return self._value

    @property
    def rule(self) -> Rule:
        """How λ moves; a resumed run keeps the rule that it started with."""
        return self._rule

    @property
    def at_maximum(self) -> bool:
        """Whether λ is at its maximum: ε may be out of reach."""
        return self._value >= self._maximum

    @property
    def bounded(self) -> bool:
        """Whether the size of the gradients kept λ from rising in the last step."""
        return self._bounded

    @property
    def at_zero(self) -> bool:
        """Whether λ is 0 or nearly so: L_ret is below ε, and retention has no weight."""
        # Relative steps never quite reach 0.
        return self._value <= (0.0 if self._rule is Rule.ABSOLUTE else NEARLY_ZERO)

    def step(self, loss: float, epsilon: float, *, gradient_ratio: float | None = None) -> float:
        """Update λ after a turn with this L_ret and this budget, clip it, and return it.

        `gradient_ratio` is |g_task| / |g_ret|, if it was measured. A λ that never moves, because
        the lr is 0, is not bounded by it.
        """
        if not math.isfinite(loss - epsilon):
            raise ValueError(f"the violation is not finite: L_ret = {loss}, ε = {epsilon}")
        absolute = self._rule is Rule.ABSOLUTE
        violation = loss - epsilon if absolute else relative_violation(loss, epsilon)
        update = self._lr * self._proportional(violation) if self._kp else 0.0
        gain = self._lr * self._ki
        if absolute:
            value = self._value + gain * violation
        elif violation > 0:
            value = self._value + gain * min(violation * self._every, LARGEST_VIOLATION)
        else:
            fall = gain * -violation * self._every
            value = self._value / (1 + fall * self._value)
        self._value = min(max(value + update, 0.0), self._maximum)
        self._bound(gradient_ratio)
        return self._value

    def _bound(self, gradient_ratio: float | None) -> None:
        if self._rule is Rule.BALANCED and self._lr > 0 and gradient_ratio is not None:
            # At least 1: retention must not lose its weight when there is nothing left to learn.
            most = max(1.0, BALANCE * gradient_ratio)
            self._bounded = self._value > most
            self._value = min(self._value, most)

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs; gains, lr and maximum come from its settings."""
        state: dict[str, Any] = {"value": self._value, "rule": self._rule.value}
        if self._bounded:
            state["bounded"] = True
        return state if self._average is None else {**state, "average": self._average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved λ, clipped to this run's maximum, by the rule that it followed."""
        value = float(state["value"])
        if value < 0 or not math.isfinite(value):
            raise ValueError(f"a saved multiplier must be finite and not negative, got {value}")
        # Missing before the first step, and without a proportional gain.
        average = float(state["average"]) if "average" in state else None
        if average is not None and not math.isfinite(average):
            raise ValueError(f"the average of a saved multiplier must be finite, got {average}")
        # Earlier versions knew one rule and did not name it.
        rule = Rule(state.get("rule", Rule.ABSOLUTE))
        self._value = min(value, self._maximum)
        self._average = average
        self._rule = rule
        self._bounded = bool(state.get("bounded", False))

    def __repr__(self) -> str:
        gains = f", kp={self._kp:g}, ki={self._ki:g}, nu={self._nu:g}"
        rule = "" if self._rule is Rule.BALANCED else f", rule={self._rule}"
        return (
            f"Multiplier(value={self._value:g}, lr={self._lr:g}, maximum={self._maximum:g}"
            f"{gains if self._kp else ''}{rule})"
        )

    def _proportional(self, violation: float) -> float:
        if self._average is None:
            self._average = 0.0
            return 0.0
        change = (1 - self._nu) * (violation - self._average)
        self._average = self._average * self._nu + (1 - self._nu) * violation
        return change * self._kp
