"""The plot of drift: how far each layer and the action have moved from the teacher."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import StrMethodFormatter

from craftcli.evaluation.results import ActionError, Drift
from craftcli.plots.labels import tail
from craftcli.plots.png import write_plot

_COLOURS = ("#1f6feb", "#d1242f", "#2da44e", "#bf8700", "#8250df", "#57606a")
_LABEL_COLUMNS = 38
_FLOOR = 1e-7
"""Drift below this share of the variance is rounding, and drawn at this value."""
_ACTION_ROWS = {
    "nmse": "predictions",
    "kl": "action tokens (KL, nats)",
    "chunk_nmse": "actions",
}

type NamedDrifts = Sequence[tuple[str, Drift]]


def plot_drift(drifts: NamedDrifts, file: Path, *, epsilon: float | None = None) -> None:
    """Draw the drift of one or several policies into a PNG file; an older plot is replaced.

    `epsilon` is the budget of the runs, if it is in the units of the plot.
    """
    write_plot(lambda: draw_drift(drifts, epsilon=epsilon), file)


def draw_drift(drifts: NamedDrifts, *, epsilon: float | None = None) -> Figure:
    """Draw the share of the teacher's variance that moved, and the alignment, by layer."""
    rows = _rows(drifts)
    figure = Figure(
        figsize=(11, max(2.2 + 0.34 * len(rows) * max(len(drifts) * 0.6, 1), 3.4)),
        layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.09),
    )
    FigureCanvasAgg(figure)
    figure.suptitle(
        _title(drifts),
        x=0.012,
        ha="left",
        weight="bold",
        size=14,
    )
    errors, alignment = figure.subplots(1, 2, width_ratios=(1.2, 1), sharey=True)
    _draw_errors(errors, drifts, rows, epsilon)
    _draw_alignment(alignment, drifts, rows)
    for axes in (errors, alignment):
        axes.grid(axis="x", color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    # The first layer on top.
    errors.set_yticks(range(len(rows)), rows)
    errors.set_ylim(len(rows) - 0.4, -0.8)
    if len(drifts) > 1:
        handles, labels = errors.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False)
    return figure


def _title(drifts: NamedDrifts) -> str:
    """How many anchors there are, and whose drift it is; several policies have a legend."""
    held_out = all(drift.shared_rows == 0 for _, drift in drifts)
    anchors = f"{drifts[0][1].rows} {'held-out ' if held_out else ''}anchors"
    whose = f": {tail(drifts[0][0], _LABEL_COLUMNS)}" if len(drifts) == 1 else ""
    return f"Drift from the teacher on {anchors}{whose}"


def _draw_errors(axes: Axes, drifts: NamedDrifts, rows: list[str], epsilon: float | None) -> None:
    """Draw points, not bars: the length of a bar means nothing on a logarithmic axis."""
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
    if epsilon:
        axes.axvline(epsilon, color="#57606a", lw=1, ls=(0, (4, 3)), zorder=1)
        # At the top, where no row is.
        axes.annotate(
            f"budget ε = {epsilon:g}",
            (epsilon, 1),
            (4, -2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            fontsize=9,
            color="#57606a",
        )
        everything.append(epsilon)
    axes.set_xscale("log")
    # Whole decades, with space on the right for the numbers.
    axes.set_xlim(10 ** math.floor(math.log10(min(everything) / 1.5)), max(1.0, *everything) * 5)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    kinds = {drift.action.kind for _, drift in drifts if drift.action}
    axes.set_title("Distance to the teacher")
    tokens = "; tokens in nats" if "kl" in kinds else ""
    axes.set_xlabel(f"nmse, 1 is all of the teacher's variance{tokens}; logarithmic axis")


def _draw_alignment(axes: Axes, drifts: NamedDrifts, rows: list[str]) -> None:
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
        axes.annotate(
            text,
            (value, y),
            (9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            # Over the line of the budget, not through it.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )


def _rows(drifts: NamedDrifts) -> list[str]:
    """The layers of all policies, then the kinds of action error."""
    layers = [layer.layer for _, drift in drifts for layer in drift.layers]
    actions = [_action_row(drift.action) for _, drift in drifts if drift.action]
    return list(dict.fromkeys([*layers, *actions]))


def _action_row(action: ActionError) -> str:
    return _ACTION_ROWS[action.kind]


def _places(rows: list[str], place: int, drifts: NamedDrifts) -> list[float]:
    """The heights of one policy's points, beside those of the others."""
    shift = (place - (len(drifts) - 1) / 2) * 0.7 / len(drifts)
    return [row + shift for row in range(len(rows))]


def _number(value: float) -> str:
    return f"{value:.2g}" if value >= _FLOOR else f"< {_FLOOR:g}"
