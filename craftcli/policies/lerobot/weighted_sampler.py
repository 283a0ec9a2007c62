"""Draws frames of several datasets by weights, in an order that only the seed decides.

An epoch has as many draws as there are usable frames in all. Each dataset gets its share of them,
to the nearest whole number, in random places. Within a dataset, all frames are drawn
before one comes again; the next epoch continues where the last one stopped.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from craftcli.errors import EXIT_USAGE, CraftError


class WeightedSampler:
    """Frames by weights, with the state of LeRobot's EpisodeAwareSampler: epoch and start.

    Every epoch is a function of the seed and its number, so that a run resumes anywhere.
    """

    def __init__(
        self, frames: Sequence[NDArray[np.int64]], *, shares: Sequence[float], seed: int
    ) -> None:
        """`frames` are the usable frames of each dataset."""
        self._frames = frames
        self._seed = seed
        self.quotas = apportion(sum(len(own) for own in frames), shares)
        """Draws of each dataset in an epoch."""
        self._epoch, self._start = 0, 0

    def __len__(self) -> int:
        return sum(self.quotas)

    def __iter__(self) -> Iterator[int]:
        epoch, start = self._epoch, self._start
        self._epoch, self._start = epoch + 1, 0
        return iter(self.epoch(epoch)[start:].tolist())

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at this place."""
        self._epoch, self._start = state["epoch"], state["start_index"]

    def epoch(self, number: int) -> NDArray[np.int64]:
        """All frames of an epoch, in order."""
        turns = np.repeat(np.arange(len(self.quotas)), self.quotas)
        np.random.default_rng([self._seed, number]).shuffle(turns)
        drawn = np.empty(len(turns), dtype=np.int64)
        for dataset, quota in enumerate(self.quotas):
            drawn[turns == dataset] = self._draws(dataset, number * quota, quota)
        return drawn

    def _draws(self, dataset: int, first: int, count: int) -> NDArray[np.int64]:
        """Draws of one dataset, which shows all its frames in an order of its own every round."""
        own = self._frames[dataset]
        rounds, places = np.divmod(np.arange(first, first + count), len(own))
        found = np.empty(count, dtype=np.int64)
        for number in np.unique(rounds):
            # Three numbers keep this apart from the order of an epoch, which has two.
            order = np.random.default_rng([self._seed, dataset, int(number)]).permutation(own)
            found[rounds == number] = order[places[rounds == number]]
        return found


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Divide a whole number by shares that add up to 1; every part gets at least 1.

    >>> apportion(10, [0.75, 0.25])
    [8, 2]
    >>> apportion(10, [0.999, 0.001])
    [9, 1]
    """
    if total < len(shares):
        raise CraftError(
            f"{total} samples cannot be shared by {len(shares)} datasets.",
            why="every dataset gets one at least.",
            fix=f"use {len(shares)} samples or more.",
            exit_code=EXIT_USAGE,
        )
    exact = np.asarray(shares) * total
    counts = np.maximum(np.floor(exact), 1).astype(np.int64)
    while counts.sum() != total:
        # To or from the one that is furthest from its share; the first of several.
        step = 1 if counts.sum() < total else -1
        distance = np.where((counts > 1) | (step > 0), step * (exact - counts), -np.inf)
        counts[int(distance.argmax())] += step
    return [int(count) for count in counts]
