"""The order in which anchors are met: endless, reshuffled every round, a function of the seed."""

import numpy as np
from numpy.typing import NDArray


class Walk:
    """Numbers batches of rows: the same number is always the same rows."""

    def __init__(self, rows: NDArray[np.intp], *, batch_size: int, seed: int) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._orders: dict[int, NDArray[np.intp]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, number: int) -> NDArray[np.intp]:
        """The rows of the batch of that number."""
        walked = np.arange(number * self._batch_size, (number + 1) * self._batch_size)
        rounds, offsets = np.divmod(walked, len(self._rows))
        needed = {int(r) for r in np.unique(rounds)}
        # Kept from one batch to the next: shuffling a million rows again takes 20 ms.
        self._orders = {r: self._orders.get(r, self._order(r)) for r in needed}
        picked = [self._orders[int(r)][o] for r, o in zip(rounds, offsets, strict=True)]
        rows: NDArray[np.intp] = self._rows[np.array(picked)]
        return rows

    def _order(self, number: int) -> NDArray[np.intp]:
        return np.random.default_rng([self._seed, number]).permutation(len(self._rows))
