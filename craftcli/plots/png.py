"""Writes plots as PNG files, in one style."""

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.whole_files import write_bytes

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Any: the type of the names differs between releases of matplotlib.
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "text.color": "#222222",
    # A dollar sign in the name of a task starts no formula.
    "text.parse_math": False,
}


def check_plot_file(file: Path) -> None:
    """Refuse a name without .png, and a place that holds anything but an older plot."""
    problem = None
    if file.suffix.lower() != ".png":
        problem = "the plot is a PNG, and the name does not end in .png."
    elif not file.parent.is_dir():
        problem = f"there is no folder {file.parent}."
    elif file.is_dir() or (file.exists() and not _is_png(file)):
        problem = "it exists and is not a PNG; craft only replaces older plots."
    if problem:
        raise CraftError(
            f"Cannot write the plot {file}.",
            why=problem,
            fix="choose another name, such as anchors.png.",
            exit_code=EXIT_USAGE,
        )


def write_plot(draw: Callable[[], Figure], file: Path) -> None:
    """Draw a figure into a PNG file; an older plot of that name is replaced."""
    check_plot_file(file)
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; that is no reason to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        draw().savefig(buffer, format="png", dpi=150)
    try:
        write_bytes(file, buffer.getvalue())
    except OSError as error:
        raise CraftError(
            f"Cannot write the plot {file}.",
            why=f"{error.strerror or error}.",
            fix="choose a writable folder.",
        ) from error


def _is_png(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(_SIGNATURE)) == _SIGNATURE
    except OSError:
        return False
