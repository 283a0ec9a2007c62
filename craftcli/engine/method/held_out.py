"""The constraint on anchors that are not trained on, and the gap to those that are.

Few anchors can be learned by heart: L_ret on them goes to 0, and λ with it, while the policy drifts
everywhere else. So the constraint is also measured on anchors that give no gradient, as two-dataset
methods do (Cotter et al., Training Well-Generalizing Classifiers for Fairness Metrics and Other
Data-Dependent Constraints, 2019, arXiv 1807.00028): one dataset for the parameters, another for λ.
With L_held, the loss on held-out anchors when it was last measured, the violation of a turn is

    v = max(L_ret, L_held) / ε - 1

The larger one of both, because L_held is measured now and then, and L_ret in every turn.
"""

from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

EVERY = 10
"""Retention turns between two measurements. One is a forward pass without a gradient, about a third
of a retention turn, so that they take about 3 % of its time."""
GAP = 3.0
"""L_held above so many times L_ret says that the anchors were learned by heart."""


class HeldOut:
    """The last loss on held-out anchors, and a warning when it leaves the trained one behind."""

    def __init__(self, *, window: int = 10) -> None:
        """`window` is the number of measurements that a warning is based on."""
        self.last: float | None = None
        self._is_new = False
        self._pairs: deque[tuple[float, float]] = deque(maxlen=window)
        self._warned = False

    def __repr__(self) -> str:
        return f"HeldOut(last={self.last}, measurements={len(self._pairs)})"

    def observe(self, loss: float) -> None:
        """Record a measurement of L_held."""
        self.last = loss
        self._is_new = True

    def binding(self, trained: float) -> float:
        """The loss that the budget is compared with: max(L_ret, L_held)."""
        return trained if self.last is None else max(trained, self.last)

    def compare(self, trained: float, epsilon: float) -> str | None:
        """Compare L_ret of a turn with a new measurement; returns a warning if a gap has opened."""
        if self.last is None or not self._is_new:
            return None
        self._is_new = False
        self._pairs.append((trained, self.last))
        if len(self._pairs) < (self._pairs.maxlen or 0):
            return None
        l_ret, l_held = (fmean(values) for values in zip(*self._pairs, strict=True))
        apart = l_held > GAP * l_ret and l_held > epsilon
        warns, self._warned = apart and not self._warned, apart
        return self._warning(l_ret, l_held, epsilon) if warns else None

    def _warning(self, l_ret: float, l_held: float, epsilon: float) -> str:
        return (
            f"L_held, on anchors that are not trained on, is {l_held:.3g} and above ε = "
            f"{epsilon:.3g}, while L_ret is {l_ret:.3g}: there are too few anchors, and the policy "
            "drifts between them. Build a cache with more --samples, or with --augment, which "
            "makes anchors of the frames that there are."
        )

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        pairs = [list(pair) for pair in self._pairs]
        return {
            "last": self.last,
            "is_new": self._is_new,
            "pairs": pairs,
            "warned": self._warned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.last = state["last"]
        self._is_new = bool(state["is_new"])
        self._pairs.clear()
        self._pairs.extend((float(trained), float(held)) for trained, held in state["pairs"])
        self._warned = bool(state["warned"])
