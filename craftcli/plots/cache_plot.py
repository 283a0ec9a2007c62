"""The plot of a cache: facts, norms of its states, similarity of its rows, sampled episodes."""

import textwrap
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from craftcli.cache.format import Manifest
from craftcli.cache.reading.reader import CacheReader
from craftcli.plots.cache_view import CacheView, RowMap, view_cache
from craftcli.plots.labels import distinct, tail
from craftcli.plots.png import write_plot

# Okabe and Ito's palette, which people with any colour vision can tell apart, without its pale
# colours.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
OTHERS = "#444444"
UNSAMPLED = "#9A9A9A"
_FACT_COLUMNS = 30
_LABEL_COLUMNS = 34


def plot_cache(reader: CacheReader, file: Path) -> None:
    """Draw a cache into a PNG file; an older plot of that name is replaced."""
    write_plot(lambda: draw_cache(view_cache(reader), reader), file)


def draw_cache(view: CacheView, reader: CacheReader) -> Figure:
    """Draw facts, norms and similarity side by side, and the episodes below."""
    manifest = reader.manifest
    lanes = len(view.episode_rows) + (view.sampled_episodes < view.episodes)
    top, bottom = 4.4, 1.1 + 0.26 * max(lanes, 2)
    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.09)
    figure = Figure(figsize=(17 if view.row_map else 13, top + bottom), layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(f"Anchor cache {reader.path.name}", x=0.012, ha="left", weight="bold", size=14)
    # Two figures in one: long names of tasks must not move the upper panels.
    (upper,), (lower,) = figure.subfigures(2, 1, squeeze=False, height_ratios=(top, bottom))
    widths = (0.95, 1.1, 1.25, 1.1) if view.row_map else (0.95, 1.1, 1.25)
    facts, norms, similarity, *more = upper.subplots(1, len(widths), width_ratios=widths)
    if view.row_map:
        _draw_row_map(more[0], view.row_map)
    _draw_facts(facts, manifest, view.rows)
    _draw_norms(norms, view)
    deepest = f"{manifest.stack}.{max(manifest.layers, default=0)}"
    _draw_similarity(similarity, view, deepest)
    if manifest.made and manifest.made.source == "statistics":
        _write_message(lower.subplots(), "no episodes: every row was drawn from statistics")
    else:
        _draw_episodes(lower.subplots(), view)
    return figure


def _draw_facts(axes: Axes, manifest: Manifest, valid_rows: int) -> None:
    """Write the facts of the manifest."""
    axes.axis("off")
    axes.set_title("What it is")
    facts = {
        "Rows": f"{valid_rows} valid of {manifest.rows}",
        **({"Made": f"{manifest.made.rows}: {manifest.made.describe()}"} if manifest.made else {}),
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


def _draw_norms(axes: Axes, view: CacheView) -> None:
    """Draw the norms of the vectors, one violin per layer."""
    axes.set_title("How long the hidden states are")
    drawn = {layer: norms for layer, norms in view.norms.items() if norms.size}
    if not drawn:
        _write_message(axes, "no hidden states")
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


def _draw_similarity(axes: Axes, view: CacheView, layer: str) -> None:
    """Draw the cosine of every pair of rows, with lines between the tasks."""
    count = len(view.similarity_lanes)
    if not count:
        axes.set_title("How alike the rows are")
        _write_message(axes, "no hidden states")
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
        # White on black is visible on light and dark colours.
        for colour, width in (("black", 2.4 * thin), ("white", 1.0 * thin)):
            axes.axhline(edge, color=colour, linewidth=width)
            axes.axvline(edge, color=colour, linewidth=width)
    for start, end in zip(starts, ends, strict=True):
        colour = _lane_colour(view, int(view.similarity_lanes[start]))
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


def _draw_row_map(axes: Axes, row_map: RowMap) -> None:
    """Draw real rows over made ones, on the first two principal components."""
    axes.set_title("Where real and made rows lie")
    kinds = (("made", row_map.made, COLOURS[1], "o"), ("real", row_map.real, COLOURS[0], "D"))
    for name, places, colour, marker in kinds:
        label = f"{len(places)} {name}"
        across, up = places[:, 0], places[:, 1]
        axes.scatter(across, up, s=14, color=colour, marker=marker, alpha=0.7, label=label)
    axes.legend(loc="upper right", framealpha=0.8)
    axes.grid(color="#E4E4E4")
    axes.set_axisbelow(True)
    axes.set_xlabel(textwrap.fill(f"first principal component of {row_map.of}", _FACT_COLUMNS))
    axes.set_ylabel("second")


def _draw_episodes(axes: Axes, view: CacheView) -> None:
    """Draw how many rows each episode gave: one lane per task, one bar per episode."""
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
            color=_lane_colour(view, lane),
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


def _lane_colour(view: CacheView, lane: int) -> str:
    """The colour of a lane; colours repeat, so lanes are labelled too."""
    return OTHERS if lane == len(view.tasks) else COLOURS[lane % len(COLOURS)]


def _write_message(axes: Axes, text: str) -> None:
    axes.axis("off")
    axes.text(0.5, 0.5, text, ha="center", va="center", color="#666666", transform=axes.transAxes)
