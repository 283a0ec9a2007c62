"""Which anchors are held out: never trained on, they show what retention holds elsewhere."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.variations import read_variations
from craftcli.errors import EXIT_USAGE, CraftError

FEWEST = 16
"""Held-out anchors that tell anything."""
_LARGEST_SHARE = 0.25
"""Of the usable anchors; more than that would be missed in training."""


class SplitRows(NamedTuple):
    """Rows of a cache."""

    trained: NDArray[np.intp]
    held_out: NDArray[np.intp]


def split_rows(
    reader: CacheReader, rows: NDArray[np.intp], *, share: float, seed: int
) -> SplitRows:
    """Hold a share of the rows out, chosen by the seed alone.

    Where a cache has both frames as they are and rows made of them, only made ones are held out:
    the frames are the ones that are known to matter.

    Raises:
        CraftError: There are too few anchors.
    """
    count = max(FEWEST, round(share * len(rows)))
    candidates = _candidates(reader, rows)
    largest = max(share, _LARGEST_SHARE)
    if count > largest * len(rows):
        needed = math.ceil(FEWEST / largest)
        raise _too_few(reader, f"{needed} usable ones are needed, and it has {len(rows)}")
    if count > len(candidates):
        raise _too_few(
            reader,
            f"{count} made ones are needed, and it has {len(candidates)}; frames as they are stay "
            "in training",
        )
    # A third number keeps this apart from the order of rounds, which has two.
    chosen = np.random.default_rng([seed, len(rows), 0]).choice(candidates, count, replace=False)
    held_out = np.sort(chosen)
    return SplitRows(trained=np.setdiff1d(rows, held_out), held_out=held_out)


def _candidates(reader: CacheReader, rows: NDArray[Any]) -> NDArray[Any]:
    variations = read_variations(reader, rows)
    if variations is None:
        return rows
    made = variations.seeds >= 0
    return rows[made] if made.any() else rows


def _too_few(reader: CacheReader, why: str) -> CraftError:
    return CraftError(
        f"The cache {reader.path} has too few anchors to hold some out.",
        why=f"{why}.",
        fix="build a cache with more --samples or with --augment, or use --held-out-share 0.",
        exit_code=EXIT_USAGE,
    )
