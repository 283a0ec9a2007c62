"""How the numbers of a state move together, as the frames of a dataset show it.

Some states hold the last observation beside the present one: in Meta-World number 18 is number 0 of
the step before. Such a number *repeats* another. Drawn or moved apart, the two tell of a speed that
the robot never had, and what the teacher answers there says little about the old skill.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from craftcli.policies.lerobot.fast_rows import number_parts

FRAMES = 4096
"""Frames that are looked at: enough for a speed, and few, because a live teacher reads them in
every step."""
_NEAR_RANGE = 0.03
"""How far the smallest and largest values of a number and its repetition may differ, in ranges."""
_NEAR_DEVIATION = 0.05
_NEAR_VALUES = 0.15
"""Root mean square of their difference, in deviations. In Meta-World a number and itself a step
earlier differ by 0.04 to 0.11, hand and object by 0.23 or more."""
_STILL = 1e-3
"""Deviation of a number that stands still, in ranges of the statistics."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Movement:
    """Which numbers of a vector repeat others, and how fast each moves."""

    leads: NDArray[np.intp]
    """For every number the first one that it repeats; its own place if it repeats none."""
    speed: NDArray[np.float64]
    """Root mean square of a number's change from one frame to the next, in deviations."""

    @property
    def repeats(self) -> NDArray[np.bool_]:
        """Which numbers repeat another."""
        repeats: NDArray[np.bool_] = self.leads != np.arange(len(self.leads))
        return repeats

    def key(self) -> bytes:
        """Equal for equal movements."""
        return self.leads.astype(np.int64).tobytes() + self.speed.tobytes()


def find_movement(
    values: NDArray[np.float64],
    follows: NDArray[np.bool_],
    *,
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    deviation: NDArray[np.float64],
) -> Movement:
    """Find the movement in the frames [frames, numbers] of a vector with these statistics.

    A number repeats an earlier one if both have nearly the same statistics, and nearly the same
    value in every frame; or if both stand still in these frames. `follows` says which frames come
    right after the one before them. A number that stands still here moves as fast as most do.
    """
    own = values.std(axis=0)
    ranges = np.maximum(high - low, 0)
    still = own <= _STILL * ranges
    alike = (
        _differ(low) <= _NEAR_RANGE * ranges,
        _differ(high) <= _NEAR_RANGE * ranges,
        _differ(deviation) <= _NEAR_DEVIATION * deviation,
        (_rms_differences(values) <= _NEAR_VALUES * np.maximum.outer(own, own))
        | np.logical_and.outer(still, still),
    )
    # The first in each row; a number always is like itself.
    leads = np.logical_and.reduce(alike).argmax(axis=1)
    # What repeats a repetition repeats the first.
    for number in range(len(leads)):
        leads[number] = leads[leads[number]]
    changes = np.diff(values, axis=0)[follows[1:]]
    speed = np.zeros(len(low))
    if len(changes) and not still.all():
        speed[~still] = np.sqrt((changes[:, ~still] ** 2).mean(axis=0)) / own[~still]
        speed[still] = np.median(speed[~still])
    return Movement(leads=leads, speed=speed)


def read_vector(
    dataset: Any, name: str, rows: Sequence[int] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]] | None:
    """Some rows of a vector, or the first ones, and which of them follow the one before.

    None if the dataset has no such vector.
    """
    if name not in dataset.meta.features:
        return None

    def column(name: str) -> pa.ChunkedArray:
        whole = dataset.hf_dataset.data.column(name)
        return whole.slice(0, FRAMES) if rows is None else whole.take(pa.array(rows))

    parts = number_parts(column(name))
    if not parts:
        return None
    values = np.concatenate([part.reshape(len(part), -1) for part in parts]).astype(np.float64)
    episodes, frames = (column(n).to_numpy() for n in ("episode_index", "frame_index"))
    follows = np.zeros(len(values), dtype=bool)
    follows[1:] = (np.diff(episodes) == 0) & (np.diff(frames) == 1)
    finite = np.isfinite(values).all(axis=1)
    # A row after one that is left out follows nothing.
    follows[1:] &= finite[:-1]
    return values[finite], follows[finite]


def _differ(values: NDArray[np.float64]) -> NDArray[np.float64]:
    differences: NDArray[np.float64] = np.abs(np.subtract.outer(values, values))
    return differences


def _rms_differences(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[numbers, numbers]: root mean square of the difference of two numbers over all frames.

    E[(x_i - x_j)²] = Var(x_i) + Var(x_j) - 2 Cov(x_i, x_j) + (E[x_i] - E[x_j])².
    """
    centred = values - values.mean(axis=0)
    products = centred.T @ centred / max(len(values), 1)
    variances = np.diag(products)
    spread = np.add.outer(variances, variances) - 2 * products
    found: NDArray[np.float64] = np.sqrt(np.maximum(spread, 0) + _differ(values.mean(axis=0)) ** 2)
    return found
