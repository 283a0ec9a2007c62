"""The picture of success matrices: a heat map for every arm, mean over seeds."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matrices import Matrix
from numpy.typing import NDArray

_COLUMNS = 4


def draw_matrices(tasks: Sequence[str], matrices: Sequence[Matrix], file: Path) -> Path:
    """Draw success on every task (across) after each of the tasks (down)."""
    names = [task.removesuffix("-v3") for task in tasks]
    arms = list(dict.fromkeys(matrix.arm for matrix in matrices))
    rows = -(-len(arms) // _COLUMNS)
    columns = min(_COLUMNS, len(arms))
    size = (3.2 * columns + 1.6, 3.4 * rows + 2.0)
    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for place, (axes, arm) in enumerate(zip(panels.flat, arms, strict=False)):
        own = [matrix for matrix in matrices if matrix.arm == arm]
        image = axes.imshow(_mean(own, len(tasks)), vmin=0, vmax=1, cmap="viridis")
        axes.set_title(f"{arm} ({_seeds(own)})", fontsize=8)
        # Panels without one below them carry the names.
        below = place + columns < len(arms)
        axes.set_xticks(range(len(tasks)), [] if below else names, rotation=90, fontsize=7)
        axes.set_yticks(range(len(tasks)), [] if place % columns else names, fontsize=7)
    for axes in panels.flat[len(arms) :]:
        axes.set_axis_off()
    figure.supylabel("after learning", fontsize=9)
    figure.supxlabel("success on", fontsize=9)
    figure.colorbar(image, ax=panels, shrink=0.6, label="success")
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def _seeds(matrices: Sequence[Matrix]) -> str:
    return "1 seed" if len(matrices) == 1 else f"{len(matrices)} seeds"


def _mean(matrices: Sequence[Matrix], size: int) -> NDArray[np.float64]:
    """The mean matrix; not a number where nothing was measured."""
    every = np.full((len(matrices), size, size), np.nan)
    for values, matrix in zip(every, matrices, strict=True):
        # Joint training has the last row alone.
        first = size - 1 if not matrix.in_turn else 0
        for place, row in enumerate(matrix.rows, start=first):
            values[place, : len(row)] = row
    return np.asarray(every.mean(axis=0))
