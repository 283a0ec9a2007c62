"""The trade-off plot: success on the old tasks against success on the new one."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from craftcli.compare.arm_style import GRID, MUTED, PAPER, colour, gid
from craftcli.compare.compare import ArmResult, Comparison
from craftcli.compare.estimates import Estimate
from craftcli.compare.runs import NEW, OLD
from craftcli.plots.labels import shorten

MARKER_WIDTH = 0.042
"""In units of the axes: the centres of two markers must be at least this far apart."""
_LABEL_COLUMNS = 46
_MANY = 8
"""With more arms than this, intervals are drawn faintly: in full, they would hide the points."""


def draw_trade_off(comparison: Comparison) -> Figure | None:
    """Draw numbered points with intervals, and their names; None without success rates."""
    drawn = [row for row in comparison.rows if row.estimates[OLD] and row.estimates[NEW]]
    if not drawn:
        return None
    figure = Figure(
        figsize=(10.4, max(5.6, 1.1 + 0.27 * len(drawn))),
        # The axes are square, and the layout leaves no room for their title by itself.
        layout=ConstrainedLayoutEngine(h_pad=0.12),
    )
    FigureCanvasAgg(figure)
    axes, names = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _prepare(axes)
    limits = _draw_limits(axes, comparison)
    _draw_curves(axes, drawn)
    places = spread_out([_place(row) for row in drawn])
    for row, place in zip(drawn, places, strict=True):
        _draw_arm(axes, row, place, faint=len(drawn) > _MANY)
    _draw_names(names, drawn, limits=limits)
    return figure


def spread_out(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Move points as little as needed so that markers do not overlap; earlier points stay."""
    placed: list[tuple[float, float]] = []
    for x, y in points:
        free = (
            place
            for place in _around(x, y)
            if all(math.dist(place, p) >= MARKER_WIDTH for p in placed)
        )
        placed.append(next(free))
    return placed


def _around(x: float, y: float) -> Iterator[tuple[float, float]]:
    """The point itself, then rings around it; in each ring, the lower left side first."""
    yield x, y
    ring = 1
    while True:
        count = 6 * ring
        for turn in range(count):
            angle = math.pi * (1.25 + 2 * ((turn + 1) // 2) * (-1) ** turn / count)
            # Slightly more than a marker, or rounding would make neighbours overlap.
            radius = ring * MARKER_WIDTH * 1.06
            place = x + radius * math.cos(angle), y + radius * math.sin(angle)
            if -0.02 <= place[0] <= 1.02 and -0.02 <= place[1] <= 1.02:
                yield place
        ring += 1


def _place(row: ArmResult) -> tuple[float, float]:
    old, new = row.estimates[OLD], row.estimates[NEW]
    return (new.mean, old.mean) if old and new else (0.0, 0.0)


def _prepare(axes: Axes) -> None:
    axes.set_title("Old skill against new skill (bars: 95 % intervals)")
    axes.set_xlabel("success on the new task")
    axes.set_ylabel("success on the old tasks")
    axes.set_xlim(-0.06, 1.06)
    axes.set_ylim(-0.06, 1.06)
    axes.set_aspect("equal")
    axes.grid(color=GRID)
    axes.set_axisbelow(True)


def _draw_limits(axes: Axes, comparison: Comparison) -> list[str]:
    """Draw dashed lines at the success to reach; returns what each line is."""
    drawn = []
    line: dict[str, Any] = {"color": MUTED, "linewidth": 1, "linestyle": (0, (4, 3)), "zorder": 1}
    if comparison.teacher and (old := comparison.teacher.estimates[OLD]):
        axes.axhline(old.mean, **line)
        drawn.append("the teacher on the old tasks")
    if comparison.plain and (new := comparison.plain.estimates[NEW]):
        axes.axvline(new.mean, **line)
        drawn.append("plain fine-tuning on the new")
    return drawn


def _draw_curves(axes: Axes, rows: Sequence[ArmResult]) -> None:
    """Join the arms of each curve, in the order of the sweep."""
    curves: dict[str, list[ArmResult]] = {}
    for row in rows:
        if curve := row.arm.runs[0].curve:
            curves.setdefault(curve, []).append(row)
    for members in curves.values():
        x, y = zip(*(_place(row) for row in members), strict=True)
        own = colour(members[0].arm)
        axes.plot(x, y, color=own, linewidth=3, alpha=0.6, zorder=3.5)


def _draw_arm(axes: Axes, row: ArmResult, place: tuple[float, float], *, faint: bool) -> None:
    old, new = row.estimates[OLD], row.estimates[NEW]
    if not (old and new):
        return
    own, arm = colour(row.arm), row.arm
    x, y = new.mean, old.mean
    alpha = 0.25 if faint else 0.55
    bar: dict[str, Any] = {"color": own, "linewidth": 1.6, "alpha": alpha, "zorder": 2}
    axes.plot(_ends(new), [y, y], **bar, gid=f"{gid(arm)}-x")
    axes.plot([x, x], _ends(old), **bar, gid=f"{gid(arm)}-y")
    if place != (x, y):
        axes.plot([x, place[0]], [y, place[1]], color=own, linewidth=1, zorder=3)
    marker: dict[str, Any] = {"color": own, "markeredgecolor": PAPER, "markersize": 15, "zorder": 4}
    axes.plot(*place, "o", **marker, gid=f"{gid(arm)}-point")
    axes.text(
        *place,
        _number(row),
        color=PAPER,
        ha="center",
        va="center_baseline",
        size=8.5,
        weight="bold",
        zorder=5,
        gid=f"{gid(arm)}-number",
    )


def _ends(estimate: Estimate) -> list[float]:
    return [end for end in (estimate.low, estimate.high) if end is not None]


def _draw_names(axes: Axes, rows: Sequence[ArmResult], *, limits: list[str]) -> None:
    """List the arms by number, with their old and new success."""
    axes.axis("off")
    axes.set_xlim(0, 1)
    axes.set_ylim(max(len(rows), 14) + 1.6, -0.4)
    if limits:
        text = f"Dashed: {', '.join(limits)}"
        axes.text(0.0, len(rows) + 1.2, text, va="center", color=MUTED, size=8.5)
    axes.text(0.8, 0, "old", ha="right", va="center", color=MUTED, size=9)
    axes.text(0.97, 0, "new", ha="right", va="center", color=MUTED, size=9)
    for line, row in enumerate(rows, 1):
        old, new = row.estimates[OLD], row.estimates[NEW]
        if not (old and new):
            continue
        axes.plot(0.03, line, "o", color=colour(row.arm), markersize=13, clip_on=False)
        number: dict[str, Any] = {
            "ha": "center",
            "va": "center_baseline",
            "size": 8,
            "weight": "bold",
        }
        axes.text(0.03, line, _number(row), color=PAPER, **number)
        label = shorten(row.arm.label, _LABEL_COLUMNS)
        axes.text(0.085, line, label, va="center", size=9)
        axes.text(0.8, line, f"{old.mean:.2f}", ha="right", va="center", size=9)
        axes.text(0.97, line, f"{new.mean:.2f}", ha="right", va="center", size=9)


def _number(row: ArmResult) -> str:
    return "T" if row.arm.number == 0 else str(row.arm.number)
