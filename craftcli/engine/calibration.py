"""A budget ε found from the run itself, for a loss whose scale the user does not know."""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

# How far above its floor a loss must be allowed, as a share of the floor: cross-entropies and the
# like differ by that much between batches of anchors without any forgetting.
_HEADROOM = 0.05


class AutoEpsilon:
    """Watches L_ret over the first retention turns, then fixes ε and says why.

    While it watches, ε is infinite: λ must stay what it is. Then ε = floor + share · rise, where
    the rise is how far the median of the later half of the turns lies above the floor, but at
    least 5 % above the floor, and at least what is only rounding. If that is 0, because the weights
    have not moved yet and the floor is 0, the last `turns` turns are watched on.
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
        """ε: infinite as long as it is not fixed."""
        return math.inf if self._value is None else self._value

    @property
    def fixed(self) -> bool:
        """Whether the watch is over."""
        return self._value is not None

    @property
    def reason(self) -> str:
        """What was seen and what follows; empty as long as ε is not fixed."""
        return self._reason

    def observe(self, loss: float) -> str | None:
        """Take in the L_ret of one retention turn; the reason at the turn that fixes ε."""
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
            "what is still rounding": self._rounding,
        }
        rule = max(candidates, key=lambda name: candidates[name])
        if candidates[rule] == 0:
            return None
        self._value = candidates[rule]
        self._reason = (
            f"ε = {self._value:.3g}: L_ret was {self._floor:.3g} at the teacher's weights (the "
            f"floor) and {later:.3g} in the later half of {self._turns} retention turns without a "
            f"budget; taken: {rule}."
        )
        return self._reason

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; it can no longer measure the floor."""
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
