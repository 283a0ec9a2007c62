"""The recipes of made rows: which frames they mix, by which weight, with which seed.

A cache stores the recipe of each row (`variation/*`); `mixtures` makes rows from recipes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.reading.reader import CacheReader

VARIATION = "variation/"
PARTNERS, WEIGHTS, SEEDS = f"{VARIATION}partner", f"{VARIATION}weight", f"{VARIATION}seed"


@dataclass(frozen=True, kw_only=True, eq=False)
class Variations:
    """The recipes of some rows."""

    partners: NDArray[np.int64]
    """The second frame of each row, by its index in the dataset; -1 for a row that is no mixture:
    a frame with other draws, or a state from statistics."""
    weights: NDArray[np.float32]
    """The weight of the first frame; the second has the rest."""
    seeds: NDArray[np.int64]
    """The seed of noise, transforms and draws of a made row; -1 for a frame as it is."""

    @property
    def mixed(self) -> NDArray[np.intp]:
        """The rows that are mixtures of two frames."""
        return np.flatnonzero((self.seeds >= 0) & (self.partners >= 0))

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The recipes as arrays of a cache."""
        return {PARTNERS: self.partners, WEIGHTS: self.weights, SEEDS: self.seeds}


def read_variations(reader: CacheReader, rows: NDArray[np.intp]) -> Variations | None:
    """The recipes of rows of a cache; None if it holds no made rows."""
    if SEEDS not in reader.array_names():
        return None
    return Variations(
        partners=reader.read(PARTNERS, rows),
        weights=reader.read(WEIGHTS, rows),
        seeds=reader.read(SEEDS, rows),
    )


def frames_as_they_are(dataset_indices: NDArray[np.int64]) -> Variations:
    """The recipes of frames that are not varied."""
    return Variations(
        partners=dataset_indices.copy(),
        weights=np.ones(len(dataset_indices), dtype=np.float32),
        seeds=np.full(len(dataset_indices), -1, dtype=np.int64),
    )
