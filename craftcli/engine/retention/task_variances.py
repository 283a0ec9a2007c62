"""The scale of nmse: how much the teacher's results vary among the anchors of one task.

Tasks differ from each other by more than frames of one task do. A variance over all of them
together would let each task drift by as much.
"""

from collections.abc import Hashable, Mapping

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.stats import Moments, scalar_variance

_MOST_ROWS = 4096
_MOST_BYTES = 64 * 2**20
"""What is read at most of an array, for all tasks together: enough for a scale, and quick."""
_FEWEST_ROWS = 16
"""Of a task. One with fewer has no variance of its own."""
_SMALLEST_SHARE = 0.01
"""Of the variance over all tasks: the least for a task in which the teacher hardly moves."""


def rows_by_task(tasks: NDArray[np.intp], usable: NDArray[np.intp]) -> dict[int, NDArray[np.intp]]:
    """The usable rows of each task that has enough of them.

    There are none if there is only one task: its variance is that of all rows.
    """
    groups = {int(task): usable[tasks[usable] == task] for task in np.unique(tasks[usable])}
    if len(groups) < 2:
        return {}
    return {task: rows for task, rows in groups.items() if len(rows) >= _FEWEST_ROWS}


def spread(rows: NDArray[np.intp], row_bytes: int, *, groups: int = 1) -> NDArray[np.intp]:
    """Some of the rows, at equal distances; there are so many `groups` of rows to read."""
    most = min(_MOST_ROWS, _MOST_BYTES // max(row_bytes, 1)) // groups
    chosen = np.linspace(0, len(rows) - 1, max(most, _FEWEST_ROWS)).round().astype(np.intp)
    return rows[np.unique(chosen)]


def within_tasks[Task: Hashable](
    moments: Mapping[Task, Moments], whole: float
) -> dict[Task, float]:
    """The variance of each task that has enough rows; `whole` is the variance over all rows."""
    return {
        task: max(scalar_variance(own.variance, own.count), _SMALLEST_SHARE * whole)
        for task, own in moments.items()
        if own.count.max() >= _FEWEST_ROWS
    }
