"""Linear centred kernel alignment: how alike two representations are, up to rotation and scale."""

import torch
from torch import Tensor


class LinearCka:
    """The alignment of paired vectors, given piece by piece; 1 where one is the other rotated.

    Sums are kept in float64: centring subtracts numbers that are nearly equal.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sums: dict[str, Tensor] = {}

    def update(self, ours: Tensor, theirs: Tensor) -> None:
        """Add pairs: [N, D] and [N, E]."""
        x, y = ours.detach().double().cpu(), theirs.detach().double().cpu()
        self._count += len(x)
        new = {"x": x.sum(0), "y": y.sum(0), "xx": x.T @ x, "yy": y.T @ y, "xy": x.T @ y}
        self._sums = {name: self._sums.get(name, 0) + value for name, value in new.items()}

    @property
    def value(self) -> float:
        """The alignment in 0..1; 0 where one of the two does not vary at all."""
        cross = self._centred("x", "y").square().sum()
        own = self._centred("x", "x").norm() * self._centred("y", "y").norm()
        return float(cross / own) if own > 0 else 0.0

    def _centred(self, a: str, b: str) -> Tensor:
        """Products of the vectors less their means."""
        sums = self._sums
        return sums[a + b] - torch.outer(sums[a], sums[b]) / self._count
