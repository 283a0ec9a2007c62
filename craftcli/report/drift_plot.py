"""The picture of a drift: how far each layer, and the action, has moved from the teacher."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import StrMethodFormatter

from craftcli.errors import CraftError
from craftcli.evaluation.findings import ActionError, Drift
from craftcli.report.cache_plot import STYLE, check_plot_file
from craftcli.report.labels import tail

__all__ = ["check_plot_file", "draw_drift", "plot_drift"]

_COLOURS = ("#1f6feb", "#d1242f", "#2da44e", "#bf8700", "#8250df", "#57606a")
_LABEL_COLUMNS = 38
_FLOOR = 1e-7
"""Share of the variance below which drift is rounding, and is drawn as if it were this."""
_ACTION_ROWS = {
    "nmse": "predictions",
    "kl": "action tokens (KL, nats)",
    "chunk_nmse": "actions",
}

type Named = Sequence[tuple[str, Drift]]


def plot_drift(drifts: Named, file: Path) -> None:
    """Draw one or several policies' drift into a PNG; an older plot of that name is replaced."""
    check_plot_file(file)
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        draw_drift(drifts).savefig(buffer, format="png", dpi=150)
    try:
        file.write_bytes(buffer.getvalue())
    except OSError as error:
        raise CraftError(
            f"Cannot write the plot {file}.",
            why=f"{error.strerror or error}.",
            fix="choose a folder that you may write to.",
        ) from error


def draw_drift(drifts: Named) -> Figure:
    """The share of the teacher's variance that moved, and the alignment, layer by layer."""
    rows = _rows(drifts)
    figure = Figure(
        figsize=(11, max(2.2 + 0.34 * len(rows) * max(len(drifts) * 0.6, 1), 3.4)),
        layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.09),
    )
    FigureCanvasAgg(figure)
    held_out = all(drift.shared_rows == 0 for _, drift in drifts)
    figure.suptitle(
        f"Drift from the teacher on {drifts[0][1].rows} {'held-out ' if held_out else ''}anchors",
        x=0.012,
        ha="left",
        weight="bold",
        size=14,
    )
    errors, alignment = figure.subplots(1, 2, width_ratios=(1.2, 1), sharey=True)
    _draw_errors(errors, drifts, rows)
    _draw_alignment(alignment, drifts, rows)
    for axes in (errors, alignment):
        axes.grid(axis="x", color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    # The first layer on top.
    errors.set_yticks(range(len(rows)), rows)
    errors.set_ylim(len(rows) - 0.4, -0.6)
    if len(drifts) > 1:
        handles, labels = errors.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False)
    return figure


def _draw_errors(axes: Axes, drifts: Named, rows: list[str]) -> None:
    """Points, not bars: on a logarithmic axis lengths say nothing."""
    everything = []
    for place, (label, drift) in enumerate(drifts):
        known = {layer.layer: layer.nmse for layer in drift.layers}
        if drift.action:
            known[_action_row(drift.action)] = drift.action.value
        at = [y for y, row in zip(_places(rows, place, drifts), rows, strict=True) if row in known]
        values = [max(known[row], _FLOOR) for row in rows if row in known]
        written = [_number(known[row]) for row in rows if row in known]
        _draw_points(axes, values, at, written, place, label=tail(label, _LABEL_COLUMNS))
        everything += values
    axes.set_xscale("log")
    # Whole decades, and room on the right for the numbers.
    axes.set_xlim(10 ** math.floor(math.log10(min(everything) / 1.5)), max(1.0, *everything) * 5)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_title("Share of the teacher's variance that moved")
    axes.set_xlabel("nmse, logarithmic; 1 is all of that variance")


def _draw_alignment(axes: Axes, drifts: Named, rows: list[str]) -> None:
    for place, (_, drift) in enumerate(drifts):
        known = {layer.layer: layer.cka for layer in drift.layers}
        at = [y for y, row in zip(_places(rows, place, drifts), rows, strict=True) if row in known]
        values = [known[row] for row in rows if row in known]
        axes.hlines(at, 0, values, color=_COLOURS[place % len(_COLOURS)], lw=1.5)
        _draw_points(axes, values, at, [f"{value:.3f}" for value in values], place)
    axes.set_xlim(0, 1.15)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set_title("Alignment with the teacher")
    axes.set_xlabel("linear CKA; 1 is the same up to rotation and scale")


def _draw_points(
    axes: Axes,
    values: list[float],
    at: list[float],
    written: list[str],
    place: int,
    *,
    label: str | None = None,
) -> None:
    colour = _COLOURS[place % len(_COLOURS)]
    axes.plot(values, at, "o", color=colour, ms=8, label=label)
    for value, y, text in zip(values, at, written, strict=True):
        axes.annotate(text, (value, y), (9, 0), textcoords="offset points", va="center", fontsize=9)


def _rows(drifts: Named) -> list[str]:
    """The layers of all, then the kinds of action error."""
    layers = [layer.layer for _, drift in drifts for layer in drift.layers]
    actions = [_action_row(drift.action) for _, drift in drifts if drift.action]
    return list(dict.fromkeys([*layers, *actions]))


def _action_row(action: ActionError) -> str:
    return _ACTION_ROWS[action.kind]


def _places(rows: list[str], place: int, drifts: Named) -> list[float]:
    """Where the points of one policy lie beside those of the others."""
    shift = (place - (len(drifts) - 1) / 2) * 0.7 / len(drifts)
    return [row + shift for row in range(len(rows))]


def _number(value: float) -> str:
    return f"{value:.2g}" if value >= _FLOOR else f"< {_FLOOR:g}"
