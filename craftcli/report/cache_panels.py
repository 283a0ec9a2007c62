"""The panels of a cache's picture, each drawn into axes of its own."""

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from craftcli.cache.format import Manifest
from craftcli.report.cache_view import CacheView
from craftcli.report.labels import distinct, tail

# Okabe and Ito's colours, which stay apart for every kind of colour vision, without the faint ones.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
OTHERS = "#444444"
UNSAMPLED = "#9A9A9A"
_FACT_COLUMNS = 30
_LABEL_COLUMNS = 34


def draw_facts(axes: Axes, manifest: Manifest, valid_rows: int) -> None:
    """What the cache is, in words."""
    axes.axis("off")
    axes.set_title("What it is")
    facts = {
        "Rows": f"{valid_rows} valid of {manifest.rows}",
        "Layers": f"{', '.join(map(str, manifest.layers))} of {manifest.layer_count}, "
        f"stack {manifest.stack}",
        "Pooling": f"{manifest.pooling}: {manifest.vectors} × {manifest.dim}, {manifest.dtype}",
        "Sampling": f"{manifest.sampling}, seed {manifest.seed}",
        "Images": manifest.images,
        "Teacher": f"{tail(manifest.teacher.source, _FACT_COLUMNS)} "
        f"({manifest.teacher.policy_type})",
        "Weights": manifest.teacher.weights_digest[:12],
        "Dataset": f"{tail(manifest.dataset.repo_id, _FACT_COLUMNS)} "
        f"({manifest.dataset.episodes} episodes, {manifest.dataset.frames} frames)",
        "Fingerprint": manifest.dataset.fingerprint[:12],
    }
    height = 1.0
    for name, value in facts.items():
        lines = textwrap.wrap(value, _FACT_COLUMNS)
        axes.text(0, height, name, va="top", color="#666666", transform=axes.transAxes, size=9)
        axes.text(0.31, height, "\n".join(lines), va="top", transform=axes.transAxes, size=9)
        height -= 0.05 * len(lines) + 0.035


def draw_norms(axes: Axes, view: CacheView) -> None:
    """The lengths of the vectors, a violin to a layer."""
    axes.set_title("How long the hidden states are")
    drawn = {layer: norms for layer, norms in view.norms.items() if norms.size}
    if not drawn:
        _say_nothing(axes, "no hidden states")
        return
    places = np.arange(len(drawn))
    parts = axes.violinplot(list(drawn.values()), places, widths=0.8, showextrema=False)
    for body in parts["bodies"]:  # type: ignore[attr-defined]  # matplotlib types it as one artist
        body.set(facecolor=COLOURS[0], alpha=0.35, edgecolor="none")
    for place, norms in zip(places, drawn.values(), strict=True):
        low, middle, high = np.quantile(norms, (0.25, 0.5, 0.75))
        axes.plot([place, place], [low, high], color=COLOURS[0], linewidth=5, solid_capstyle="butt")
        axes.plot(place, middle, "o", color="white", markeredgecolor=COLOURS[0], markersize=6)
    many = len(drawn) > 6
    axes.set_xticks(places, drawn, rotation=90 if many else 0, size=7 if many else None)
    axes.set_xlim(-0.7, len(drawn) - 0.3)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#E4E4E4")
    axes.set_axisbelow(True)
    axes.set_ylabel("L2 norm of a vector")
    axes.set_xlabel(f"layer (dot: median, bar: middle half; {view.norm_rows} rows)")


def draw_similarity(axes: Axes, view: CacheView, layer: str) -> None:
    """The cosine of every pair of rows, with lines between the tasks."""
    count = len(view.similarity_lanes)
    if not count:
        axes.set_title("How alike the rows are")
        _say_nothing(axes, "no hidden states")
        return
    axes.set_title(f"How alike the rows are in {layer}")
    low = float(view.similarity.min())
    image = axes.imshow(
        view.similarity,
        cmap="cividis",
        vmin=min(low, 0.999),
        vmax=1.0,
        interpolation="nearest",
        extent=(0, count, count, 0),
    )
    axes.figure.colorbar(image, ax=axes, label="cosine of the rows' mean vectors", shrink=0.85)
    starts = np.flatnonzero(np.diff(view.similarity_lanes, prepend=-1))
    ends = np.append(starts[1:], count)
    thin = min(1.0, 8 / len(starts))
    for edge in starts[1:]:
        # White on black, to be seen on light and dark alike.
        for colour, width in (("black", 2.4 * thin), ("white", 1.0 * thin)):
            axes.axhline(edge, color=colour, linewidth=width)
            axes.axvline(edge, color=colour, linewidth=width)
    for start, end in zip(starts, ends, strict=True):
        colour = lane_colour(view, int(view.similarity_lanes[start]))
        axes.plot(
            [-0.02 * count] * 2,
            [start, end],
            color=colour,
            linewidth=6,
            clip_on=False,
            solid_capstyle="butt",
        )
    axes.set_xlim(0, count)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel(f"{count} rows by task, then episode; colours as below")


def draw_episodes(axes: Axes, view: CacheView) -> None:
    """Where in the dataset the rows are from: a lane to a task, a bar to an episode."""
    width = view.bin_episodes
    most = int(view.episode_rows.max())
    unit = "episode" if width == 1 else f"{width} episodes"
    axes.set_title(
        f"Which episodes were sampled: {view.sampled_episodes} of {view.episodes} "
        f"(full bar: {most} row{'s' if most > 1 else ''} of {'an ' * (width == 1)}{unit})"
    )
    labels = distinct(view.tasks, _LABEL_COLUMNS)
    if view.other_tasks:
        labels.append(f"{view.other_tasks} other tasks")
    left = np.arange(view.episode_rows.shape[1]) * width
    for lane, rows in enumerate(view.episode_rows):
        sampled = rows > 0
        axes.bar(
            left[sampled],
            -0.8 * rows[sampled] / most,
            width,
            lane + 0.4,
            align="edge",
            color=lane_colour(view, lane),
            linewidth=0,
        )
    missed = view.episode_rows.sum(axis=0) == 0
    if missed.any():
        axes.bar(
            left[missed], -0.8, width, len(labels) + 0.4, align="edge", color=UNSAMPLED, linewidth=0
        )
        labels.append("not sampled")
    axes.set_yticks(range(len(labels)), labels, size=9)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(0, view.episodes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#EFEFEF")
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("episode of the dataset")


def lane_colour(view: CacheView, lane: int) -> str:
    """The colour of a task; lanes are labelled, so that colours may come again."""
    return OTHERS if lane == len(view.tasks) else COLOURS[lane % len(COLOURS)]


def _say_nothing(axes: Axes, text: str) -> None:
    axes.axis("off")
    axes.text(0.5, 0.5, text, ha="center", va="center", color="#666666", transform=axes.transAxes)
