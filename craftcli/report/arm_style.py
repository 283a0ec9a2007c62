"""How arms look in every picture: the same colour and number wherever they are drawn."""

from typing import Any

from craftcli.report.compare_arms import Arm

# Okabe and Ito's colours, which stay apart for every kind of colour vision, without the faint ones.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK = "#222222"
MUTED = "#767676"
GRID = "#E4E4E4"
PAPER = "#FFFFFF"
"""These four are the page's own colours there, light or dark."""

# Keyed by Any: releases of matplotlib differ in how they type the names.
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    # A dollar sign in the name of an arm is no formula.
    "text.parse_math": False,
    # The same figures give the same file.
    "svg.hashsalt": "craft",
}


def colour(arm: Arm) -> str:
    """The colour of an arm; arms are numbered too, so that colours may come again."""
    return MUTED if arm.hue == 0 else COLOURS[(arm.hue - 1) % len(COLOURS)]


def gid(arm: Arm) -> str:
    """The id of what is drawn of an arm."""
    return f"arm-{arm.number}"
