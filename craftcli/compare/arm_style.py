"""The look of the plots: one colour and one id per arm, the same in all of them."""

from typing import Any

from craftcli.compare.arms import Arm
from craftcli.plots.png import STYLE as PLOT_STYLE

# Okabe and Ito's palette, which people with any colour vision can tell apart, without its pale
# colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK = "#222222"
MUTED = "#767676"
GRID = "#E4E4E4"
PAPER = "#FFFFFF"
"""On the page, these four become the page's colours, light or dark."""

# Any: the type of the names differs between releases of matplotlib.
STYLE: dict[Any, Any] = {
    **PLOT_STYLE,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    # The same numbers give the same file.
    "svg.hashsalt": "craft",
}


def colour(arm: Arm) -> str:
    """The colour of an arm; colours repeat, so arms are numbered too."""
    return MUTED if arm.hue == 0 else COLOURS[(arm.hue - 1) % len(COLOURS)]


def gid(arm: Arm) -> str:
    """The id of an arm's shapes in the SVG, by which the page highlights them."""
    return f"arm-{arm.number}"
