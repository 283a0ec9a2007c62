"""The picture of how little of the old data is enough: old success by the number of old frames."""

import re
from pathlib import Path

import matplotlib.pyplot as plt

from craftcli.compare.compare import ArmResult, Comparison

_NAME = re.compile(r"(\d+) frames: (.+)")
_FRAMES = (0, 4, 16, 64, 512)
"""Numbers of old frames, evenly spaced along the axis."""
_COLOURS = {
    "as they are": "#4477aa",
    "augment": "#228833",
    "statistics": "#aa3377",
    "replay": "#cc6677",
    "replay, varied": "#ddaa33",
}


def draw_few(comparison: Comparison, file: Path, *, title: str) -> Path:
    """Draw old and new success, with intervals, for every way to use the frames."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axes, role in zip(panels, ("old", "new"), strict=True):
        for way, points in _curves(comparison).items():
            _draw_curve(axes, way, points, role)
        for row, style in ((comparison.teacher, "--"), (_plain(comparison), ":")):
            if row is not None and (estimate := row.estimates.get(role)) is not None:
                axes.axhline(estimate.mean, color="0.5", ls=style, lw=1, label=row.arm.label)
        axes.set(ylim=(-0.03, 1.03), title=f"{role} tasks", xlabel="old frames")
        axes.set_xticks(range(len(_FRAMES)), list(map(str, _FRAMES)))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("success")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def _curves(comparison: Comparison) -> dict[str, dict[int, ArmResult]]:
    """The arms by the way they use frames, then by how many there are."""
    curves: dict[str, dict[int, ArmResult]] = {}
    for row in comparison.rows:
        if found := _NAME.match(row.arm.label):
            curves.setdefault(found[2], {})[int(found[1])] = row
    return curves


def _plain(comparison: Comparison) -> ArmResult | None:
    return next((row for row in comparison.rows if row.arm.label.startswith("plain")), None)


def _draw_curve(axes: plt.Axes, way: str, points: dict[int, ArmResult], role: str) -> None:
    found = {number: row.estimates.get(role) for number, row in sorted(points.items())}
    known = {number: estimate for number, estimate in found.items() if estimate is not None}
    # Beside each other, so that no interval hides another.
    shift = 0.07 * (list(_COLOURS).index(way) - len(_COLOURS) // 2) if way in _COLOURS else 0.0
    means = [estimate.mean for estimate in known.values()]
    # One run has no interval over seeds.
    lows = [e.mean if e.low is None else e.low for e in known.values()]
    highs = [e.mean if e.high is None else e.high for e in known.values()]
    errors = [
        [mean - low for mean, low in zip(means, lows, strict=True)],
        [high - mean for mean, high in zip(means, highs, strict=True)],
    ]
    axes.errorbar(
        [_FRAMES.index(number) + shift for number in known],
        means,
        yerr=errors,
        marker="o",
        ms=4,
        capsize=2,
        color=_COLOURS.get(way),
        label=way,
    )
