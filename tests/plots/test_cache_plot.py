"""The plot of a cache: the numbers in it are right, and it can be read."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from made.manifests import DATASET, TEACHER, make_manifest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from craftcli.cache.format import Manifest
from craftcli.cache.reading.reader import CacheReader
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.plots.cache_plot import draw_cache, plot_cache
from craftcli.plots.cache_view import MAX_LANES, cosines, group_tasks, spread, view_cache
from craftcli.plots.labels import distinct
from craftcli.plots.png import STYLE

PNG = b"\x89PNG\r\n\x1a\n"


class Rows:
    """Stands in for a reader: arrays in memory."""

    def __init__(self, manifest: Manifest, arrays: dict[str, Any], tasks: tuple[str, ...]) -> None:
        self.path = Path("somewhere/anchors.zarr")
        self.manifest = manifest
        self.tasks = tasks
        self.arrays = arrays

    def read(self, name: str, rows: Any) -> Any:
        return self.arrays[name][rows]

    def read_all(self, name: str) -> Any:
        return self.arrays[name]


def make(*, tasks: int = 3, layers: tuple[int, ...] = (1, 3, 2), rows: int = 60) -> Any:
    rng = np.random.default_rng(0)
    episode = np.arange(rows) // 2
    manifest = make_manifest(
        rows=rows,
        rows_per_chunk=rows,
        layers=layers,
        layer_count=18,
        pooling="vision_text",
        dim=4,
        sampling="per_episode",
        teacher=replace(
            TEACHER,
            source="/home/someone/projects/robots/outputs/train/2026/pi0_fast/checkpoints/last",
            revision=None,
            weights_digest="8" * 64,
            dtype="bfloat16",
        ),
        dataset=replace(
            DATASET,
            repo_id="an-organisation/a_dataset_with_a_rather_long_name_no_noops",
            fingerprint="8" * 64,
            episodes=rows // 2 + 10,
            frames=rows * 100,
        ),
    )
    arrays = {
        "index/episode": episode,
        "index/frame": np.arange(rows) % 2,
        "index/task": (episode * 7) % tasks,
        "valid": np.ones(rows, bool),
        "hidden_mask": np.ones((rows, 2), bool),
    }
    for layer in layers:
        arrays[f"hidden/vlm.{layer}"] = rng.normal(1, 1, (rows, 2, 4)).astype(np.float32)
    names = tuple(f"pick up the bowl number {n} and place it on the plate" for n in range(tasks))
    return Rows(manifest, arrays, names)


def test_norms_are_of_valid_targets_only() -> None:
    rows = make()
    rows.arrays["valid"][:5] = False
    rows.arrays["hidden_mask"][10, 1] = False
    rows.arrays["hidden/vlm.2"][:5] = np.nan
    rows.arrays["hidden/vlm.2"][10, 1] = np.nan
    view = view_cache(rows)
    kept = rows.arrays["hidden/vlm.2"].reshape(-1, 4)[[*range(10, 21), *range(22, 120)]]
    np.testing.assert_allclose(view.norms["vlm.2"], np.sort(np.linalg.norm(kept, axis=1)))
    assert list(view.norms) == ["vlm.1", "vlm.3", "vlm.2"]
    assert (view.rows, view.norm_rows) == (55, 55)


def test_similarity_is_of_mean_vectors_of_the_deepest_layer_by_task_and_episode() -> None:
    rows = make()
    rows.arrays["hidden_mask"][7, 0] = False
    rows.arrays["hidden_mask"][8] = False  # a row without a target has no direction
    view = view_cache(rows)
    vectors = rows.arrays["hidden/vlm.3"].astype(np.float64)
    means = vectors.mean(axis=1)
    means[7] = vectors[7, 1]
    task = rows.arrays["index/task"]
    order = [row for number in range(3) for row in np.flatnonzero(task == number) if row != 8]
    unit = means[order] / np.linalg.norm(means[order], axis=1, keepdims=True)
    np.testing.assert_allclose(view.similarity, unit @ unit.T, atol=1e-12)
    assert view.similarity_lanes.tolist() == task[order].tolist()


def test_rows_are_counted_by_task_and_episode() -> None:
    rows = make()
    rows.arrays["valid"][4:6] = False  # both rows of episode 2
    view = view_cache(rows)
    assert view.episode_rows.shape == (3, 40)
    assert view.episode_rows.sum() == 58
    task = rows.arrays["index/task"]
    assert all(view.episode_rows[task[row], row // 2] == 2 for row in range(60) if row // 2 != 2)
    assert (view.episodes, view.sampled_episodes, view.bin_episodes) == (40, 29, 1)
    assert view.tasks == rows.tasks


def test_very_many_episodes_share_bars() -> None:
    rows = make()
    rows.manifest = replace(rows.manifest, dataset=replace(rows.manifest.dataset, episodes=100_000))
    rows.arrays["index/episode"][-1] = 99_999
    view = view_cache(rows)
    assert view.bin_episodes * view.episode_rows.shape[1] >= 100_000
    assert view.episode_rows[:, -1].sum() == 1
    assert view.episode_rows.sum() == 60


def test_the_rarest_of_many_tasks_share_a_lane() -> None:
    task = np.repeat(np.arange(100, 130), [3] * 15 + [1] * 11 + [2] * 4)
    kept, others, lane = group_tasks(task)
    assert kept == [*range(100, 115), *range(126, 130)]
    assert (len(kept), others) == (MAX_LANES - 1, 11)
    assert np.unique(task[lane == MAX_LANES - 1]).tolist() == list(range(115, 126))


def test_no_valid_row_is_an_error() -> None:
    rows = make()
    rows.arrays["valid"][:] = False
    with pytest.raises(CraftError, match="none of its rows is valid"):
        view_cache(rows)


def test_cosines_and_spread_at_their_edges() -> None:
    vectors = np.array([[2.0, 0], [0, 3], [-1, 0], [0, 0]])
    expected = [[1, 0, -1, 0], [0, 1, 0, 0], [-1, 0, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(cosines(vectors), expected)
    assert spread(np.arange(10), 4).tolist() == [0, 3, 6, 9]
    assert spread(np.arange(3), 4).tolist() == [0, 1, 2]


def test_names_are_cut_where_they_are_the_same() -> None:
    long = "a rather long name of a task that"
    assert distinct(["push", "push hard"], 20) == ["push", "push hard"]
    assert distinct([f"{long} pushes", f"{long} pulls"], 20) == ["… pushes", "… pulls"]
    assert distinct([long, f"{long} pulls"], 20) == ["… that", "… that pulls"]
    assert distinct([long], 10) == ["a rather …"]


def drawn(rows: Any) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = draw_cache(view_cache(rows), rows)
        figure.set_dpi(150)
        figure.canvas.draw()
    return figure


def visible_texts(figure: Figure) -> list[Text]:
    shown = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    return [text for text in shown if id(text) not in hidden_ticks(figure)]


def hidden_ticks(figure: Figure) -> set[int]:
    """Labels of ticks outside of the view, or of axes that are off: their text is not drawn."""
    hidden = set()
    for axes in figure.findobj(Axes):
        assert isinstance(axes, Axes)
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            edge = 1e-6 * (high - low)
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                inside = low - edge <= tick.get_loc() <= high + edge
                hidden.add(id(tick.label2))
                if not inside or not axes.axison:
                    hidden.add(id(tick.label1))
    return hidden


@pytest.mark.parametrize(("tasks", "layers"), [(1, (17,)), (3, (2, 3)), (20, tuple(range(18)))])
def test_no_text_covers_another_or_leaves_the_picture(tasks: int, layers: tuple[int, ...]) -> None:
    figure = drawn(make(tasks=tasks, layers=layers))
    texts = visible_texts(figure)
    assert len(texts) > 20
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    whole = figure.bbox
    for text, box in boxes:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
        assert inside, text
    for (one, box), (other, another) in combinations(boxes, 2):
        width = min(box.x1, another.x1) - max(box.x0, another.x0)
        height = min(box.y1, another.y1) - max(box.y0, another.y0)
        # Boxes hold room for ascenders and descenders that most lines do not use.
        assert width <= 1 or height <= 3, (one, other)


def test_the_picture_of_a_real_cache_is_a_png_and_replaces_an_older_one(
    cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "anchors.png"
    file.write_bytes(PNG + b"older")
    plot_cache(CacheReader.open(cache), file)
    content = file.read_bytes()
    assert content.startswith(PNG)
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert (width, height > 600) == (1950, True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["anchors.png"]


def test_names_in_other_scripts_or_with_dollars_are_no_formulas(tmp_path: Path) -> None:
    rows = make()
    rows.tasks = ("拿起红色方块", "costs $5 or $", r"\frac{1}{2}$_$")
    plot_cache(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


def test_a_cache_without_hidden_states_shows_its_episodes(tmp_path: Path) -> None:
    rows = make()
    rows.manifest = replace(rows.manifest, kinds=("token_ce",), layers=())
    figure = drawn(rows)
    assert [text.get_text() for text in visible_texts(figure)].count("no hidden states") == 2


def a_folder(file: Path) -> None:
    file.mkdir()


def a_note(file: Path) -> None:
    file.write_text("mine")


@pytest.mark.parametrize(
    ("name", "prepare", "why"),
    [
        ("plot.pdf", lambda _: None, "does not end in .png"),
        ("no/plot.png", lambda _: None, "there is no folder"),
        ("plot.png", a_folder, "is not a PNG"),
        ("plot.png", a_note, "is not a PNG"),
    ],
)
def test_what_is_no_plot_is_not_replaced(
    tmp_path: Path, name: str, prepare: Callable[[Path], None], why: str
) -> None:
    prepare(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CraftError, match=why) as caught:
        plot_cache(make(), tmp_path / name)
    assert caught.value.exit_code == EXIT_USAGE
    assert sorted(tmp_path.rglob("*")) == before
    assert all(path.read_text() == "mine" for path in before if path.is_file())
