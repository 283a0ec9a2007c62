"""Made rows beside real ones: counts and distances."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tiny.act import STATE_ONLY
from tiny.world import write_dataset

from craftcli.cache.build.build import build_cache
from craftcli.cache.made_rows import nearest, summarize_made_rows
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.summary import summarize
from craftcli.config.cache import CacheConfig
from craftcli.plots.cache_plot import draw_cache, plot_cache
from craftcli.plots.cache_view import principal_components, view_cache
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset

POINTS = arrays(np.float64, (7, 3), elements=st.floats(-10, 10))


@pytest.fixture(scope="module")
def build_states(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CacheReader]:
    """Build a cache of a tiny ACT on states."""
    folder = tmp_path_factory.mktemp("states")
    policy = load_checkpoint(str(STATE_ONLY.make(folder / "policy")), device="cpu")
    root = str(write_dataset(folder / "data"))
    dataset = open_dataset("tiny/world", root=root, policy_config=policy.policy.config)

    def build(**settings: Any) -> CacheReader:
        output = tmp_path_factory.mktemp("cache") / "a.zarr"
        config = CacheConfig(policy="p", dataset="d", samples=6, output=output, **settings)
        build_cache(config, policy, dataset, on_plan=lambda _: None, on_rows=lambda _: None)
        return CacheReader.open(output)

    return build


@given(POINTS, POINTS)
def test_the_nearest_is_the_nearest(some: Any, others: Any) -> None:
    every = np.sqrt(((some[:, None] - others[None]) ** 2).mean(axis=2))
    np.testing.assert_allclose(nearest(some, others), every.min(axis=1), atol=1e-5)
    among = np.sqrt(((some[:, None] - some[None]) ** 2).mean(axis=2))
    np.fill_diagonal(among, np.inf)
    np.testing.assert_allclose(nearest(some, some, same=True), among.min(axis=1), atol=1e-5)


def test_principal_components_keep_distances_in_a_plane() -> None:
    plane = np.random.default_rng(0).normal(size=(9, 2)) @ [[1, 2, 0.5], [0, 1, -1]]
    places = principal_components(plane)
    for one in range(9):
        np.testing.assert_allclose(
            np.linalg.norm(places - places[one], axis=1),
            np.linalg.norm(plane - plane[one], axis=1),
        )
    assert principal_components(np.ones((3, 1))).tolist() == [[0, 0]] * 3


def test_mixtures_lie_about_as_far_as_their_noise(
    build_states: Callable[..., CacheReader],
) -> None:
    found = {
        noise: summarize_made_rows(build_states(augment=20, augment_noise=noise))
        for noise in (0.0, 0.3, 2.0)
    }
    far = []
    for summary in found.values():
        assert summary is not None
        assert (summary.rows, summary.real_rows, summary.valid_rows) == (120, 6, 120)
        vectors, layer = summary.distances
        assert vectors.of == "observation.environment_state, observation.state"
        assert layer.of == "decoder.1"
        assert vectors.real is not None
        assert vectors.real > 0
        far.append(vectors.made)
    assert far == sorted(far)
    # With so much noise nothing is near: about the noise itself.
    assert far[-1] == pytest.approx(2.0, rel=0.4)


def test_draws_lie_where_their_frames_do(build_states: Callable[..., CacheReader]) -> None:
    summary = summarize_made_rows(build_states(draws=3))
    assert summary is not None
    assert summary.distances[0].made == pytest.approx(0, abs=1e-6)


def test_statistics_have_nothing_to_compare_with(
    build_states: Callable[..., CacheReader], tmp_path: Path
) -> None:
    reader = build_states(from_statistics=True)
    summary = summarize(reader)
    assert summary.made is not None
    assert (summary.made.real_rows, summary.made.rows, summary.made.distances) == (0, 6, ())
    plot_cache(reader, tmp_path / "a.png")


def test_one_real_row_has_no_neighbour(build_states: Callable[..., CacheReader]) -> None:
    summary = summarize_made_rows(build_states(indices="3", augment=4))
    assert summary is not None
    assert [distance.real for distance in summary.distances] == [None, None]


def test_frames_alone_have_no_made_rows(build_states: Callable[..., CacheReader]) -> None:
    reader = build_states()
    assert summarize(reader).made is None
    assert view_cache(reader).row_map is None


def test_the_plot_shows_real_and_made_rows(build_states: Callable[..., CacheReader]) -> None:
    reader = build_states(augment=4)
    view = view_cache(reader)
    assert view.row_map is not None
    assert (view.row_map.real.shape, view.row_map.made.shape) == ((6, 2), (24, 2))
    figure = draw_cache(view, reader)
    axes = [axes for part in figure.subfigs for axes in part.axes]
    (panel,) = [one for one in axes if one.get_title() == "Where real and made rows lie"]
    legend = panel.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["24 made", "6 real"]
