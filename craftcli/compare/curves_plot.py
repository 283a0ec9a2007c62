"""Curves of training: loss, L_ret, λ, gradient cosine and conflict rate of every arm."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from craftcli.compare.arm_style import COLOURS, GRID, MUTED, colour
from craftcli.compare.arms import Arm
from craftcli.plots.labels import shorten

PANELS = {
    "loss": "loss of the new task",
    "l_ret": "L_ret (dashed: ε)",
    "lam": "λ",
    "cos": "gradient cosine",
    "conflict_rate": "conflict rate",
}
MEASURED_PANELS = {
    "eval_new_loss": "measured: loss of the new task",
    "eval_old_loss": "measured: retention loss",
    "eval_new_success": "measured: new success",
    "eval_old_success": "measured: old success",
}
"""Drawn beside the others, if a run was measured while it trained."""
_LOGARITHMIC = ("loss", "l_ret")
_RATES = ("conflict_rate", "eval_new_success", "eval_old_success")
_FEW_DECADES = 100
_ARMS_A_ROW = len(COLOURS)


def draw_curves(arms: Sequence[Arm]) -> Figure | None:
    """Draw rows of panels, with few arms per row so that no two arms of a row share a colour."""
    trained = [arm for arm in arms if any(run.metrics for run in arm.runs)]
    if not trained:
        return None
    groups = _rows(trained)
    panels = PANELS | {
        name: title for name, title in MEASURED_PANELS.items() if _is_known(trained, name)
    }
    size = (2.6 * len(panels), 3.3 * len(groups))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for row, some in zip(rows, groups, strict=True):
        for axes, (name, title) in zip(row.subplots(1, len(panels)), panels.items(), strict=True):
            _draw_panel(axes, some, name, title)
        _draw_legend(row, some)
    return figure


def _is_known(arms: Sequence[Arm], name: str) -> bool:
    return any(_points(run.metrics, name) for arm in arms for run in arm.runs)


def _rows(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Divide the arms into rows; points of one curve share a colour and get different rows."""
    ranks: list[list[Arm]] = []
    seen: Counter[int] = Counter()
    for arm in arms:
        if seen[arm.hue] == len(ranks):
            ranks.append([])
        ranks[seen[arm.hue]].append(arm)
        seen[arm.hue] += 1
    return [rank[i : i + _ARMS_A_ROW] for rank in ranks for i in range(0, len(rank), _ARMS_A_ROW)]


def _draw_panel(axes: Axes, arms: Sequence[Arm], name: str, title: str) -> None:
    axes.set_title(title, size=10)
    axes.set_xlabel("step")
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    lines = [
        (arm, number, points)
        for arm in arms
        for number, run in enumerate(arm.runs)
        if (points := _points(run.metrics, name))
    ]
    if not lines:
        middle: dict[str, Any] = {"ha": "center", "va": "center", "transform": axes.transAxes}
        nothing = "not measured" if name in MEASURED_PANELS else "nothing is retained"
        axes.text(0.5, 0.5, nothing, color=MUTED, size=9, **middle)
        return
    for arm, number, points in lines:
        # The first seed stands out, the others are faint.
        look: dict[str, Any] = {"linewidth": 1.6, "zorder": 3}
        if number > 0:
            look = {"linewidth": 0.9, "alpha": 0.45}
        axes.plot(*zip(*points, strict=True), color=colour(arm), **look)
        if name == "l_ret" and number == 0 and (budget := _points(arm.runs[0].metrics, "epsilon")):
            dashed: dict[str, Any] = {"linestyle": (0, (4, 3)), "linewidth": 1, "alpha": 0.8}
            axes.plot(*zip(*budget, strict=True), color=colour(arm), **dashed)
    if name in _LOGARITHMIC and all(y > 0 for *_, points in lines for _, y in points):
        axes.set_yscale("log")
        # Plain numbers, because STYLE switches formulas off.
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        low, high = axes.get_ylim()
        if high / low < _FEW_DECADES:
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    elif name in _RATES:
        axes.set_ylim(-0.03, 1.03)


def _draw_legend(row: SubFigure, arms: Sequence[Arm]) -> None:
    """Draw one legend for all panels of a row, below them."""
    lines = [Line2D([], [], color=colour(arm), linewidth=2.5) for arm in arms]
    names = [f"{arm.number}  {shorten(arm.label, 44)}" for arm in arms]
    row.legend(
        lines, names, loc="outside lower left", ncols=min(3, len(arms)), frameon=False, fontsize=9
    )


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(entry["step"], entry[name]) for entry in metrics if entry.get(name) is not None]
