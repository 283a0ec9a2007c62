"""The picture of a cache: how large its states are, how alike its rows, where they came from."""

import io
import warnings
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from craftcli.cache.reader import CacheReader
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.report.cache_panels import draw_episodes, draw_facts, draw_norms, draw_similarity
from craftcli.report.cache_view import CacheView, view_cache

_PNG = b"\x89PNG\r\n\x1a\n"
# Keyed by Any: releases differ in how they type the names.
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "text.color": "#222222",
    # A dollar sign in the name of a task is no formula.
    "text.parse_math": False,
}


def check_plot_file(file: Path) -> None:
    """Refuse a name that is no PNG's, or a place that holds something else."""
    problem = None
    if file.suffix.lower() != ".png":
        problem = "the plot is a PNG, and the name does not end in .png."
    elif not file.parent.is_dir():
        problem = f"there is no folder {file.parent}."
    elif file.is_dir() or (file.exists() and not _is_png(file)):
        problem = "what is there is not a PNG, and craft replaces nothing but an older plot."
    if problem:
        raise CraftError(
            f"Cannot write the plot {file}.",
            why=problem,
            fix="choose another name, such as anchors.png.",
            exit_code=EXIT_USAGE,
        )


def plot_cache(reader: CacheReader, file: Path) -> None:
    """Draw a cache into a PNG file; an older plot of that name is replaced."""
    check_plot_file(file)
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A task may be named in a script that the font lacks: a box is drawn, and all else stands.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        draw_cache(view_cache(reader), reader).savefig(buffer, format="png", dpi=150)
    try:
        file.write_bytes(buffer.getvalue())
    except OSError as error:
        raise CraftError(
            f"Cannot write the plot {file}.",
            why=f"{error.strerror or error}.",
            fix="choose a folder that you may write to.",
        ) from error


def draw_cache(view: CacheView, reader: CacheReader) -> Figure:
    """The figure: facts, norms and similarity side by side, the episodes below."""
    manifest = reader.manifest
    lanes = len(view.episode_rows) + (view.sampled_episodes < view.episodes)
    top, bottom = 4.4, 1.1 + 0.26 * max(lanes, 2)
    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.09)
    figure = Figure(figsize=(13, top + bottom), layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(f"Anchor cache {reader.path.name}", x=0.012, ha="left", weight="bold", size=14)
    # Two figures in one: long names of tasks must not push the upper panels aside.
    (upper,), (lower,) = figure.subfigures(2, 1, squeeze=False, height_ratios=(top, bottom))
    facts, norms, similarity = upper.subplots(1, 3, width_ratios=(0.95, 1.1, 1.25))
    draw_facts(facts, manifest, view.rows)
    draw_norms(norms, view)
    deepest = f"{manifest.stack}.{max(manifest.layers, default=0)}"
    draw_similarity(similarity, view, deepest)
    draw_episodes(lower.subplots(), view)
    return figure


def _is_png(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(_PNG)) == _PNG
    except OSError:
        return False
