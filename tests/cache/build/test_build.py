"""Building a cache: what is selected, how it is regrouped, what is written down."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from craftcli.cache.build.build import BuildPlan, build_cache
from craftcli.cache.build.recipe import resolve_recipe
from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Images, Kind, Pooling
from craftcli.config.cache import CacheConfig


def test_defaults_are_the_familys(teacher: Any) -> None:
    recipe = resolve_recipe(CacheConfig(), teacher)
    assert (recipe.stack, recipe.layers, recipe.layer_count) == ("vlm", (2, 3), 4)
    assert recipe.pooling is Pooling.ACTION_TOKENS
    assert recipe.dtype == "float32"
    assert recipe.kinds == (Kind.HIDDEN, Kind.ACTION)


@pytest.mark.parametrize(
    ("pooling", "vectors"),
    [(Pooling.ACTION_TOKENS, 11), (Pooling.VISION_TEXT, 2), (Pooling.LAST_TOKEN, 1)],
)
def test_the_manifest_tells_the_shape(
    build: Callable[..., Path], tmp_path: Path, pooling: Pooling, vectors: int
) -> None:
    path = build(tmp_path / "a.zarr", pooling=pooling, layers="-2,-1", samples=8, batch_size=3)
    manifest = CacheReader.open(path).manifest
    assert (manifest.vectors, manifest.dim, manifest.layers) == (vectors, 64, (2, 3))
    assert (manifest.pooling, manifest.rows, manifest.complete) == (pooling, 8, True)
    group = zarr.open_group(path, mode="r")
    hidden, stored = group["hidden/vlm.3"], group.attrs["craft"]
    assert isinstance(hidden, zarr.Array)
    assert hidden.shape == (8, vectors, 64)
    assert isinstance(stored, dict)
    assert stored["layers"] == [2, 3]


def test_the_batch_size_does_not_change_what_is_stored(
    build: Callable[..., Path], tmp_path: Path
) -> None:
    one = CacheReader.open(build(tmp_path / "a.zarr", samples=10, batch_size=10))
    two = CacheReader.open(build(tmp_path / "b.zarr", samples=10, batch_size=3))
    for name in one.array_names():
        if name.startswith("hidden/"):
            # Matrix products of another shape round differently.
            np.testing.assert_allclose(one.read_all(name), two.read_all(name), rtol=0, atol=1e-3)
        else:
            np.testing.assert_array_equal(one.read_all(name), two.read_all(name))


def test_rows_point_into_the_dataset(cache: Path, old_data: Any) -> None:
    reader = CacheReader.open(cache)
    for row in (0, 17, 31):
        index, episode, frame, task = (
            int(reader.read(f"index/{name}", np.array([row]))[0])
            for name in ("dataset_index", "episode", "frame", "task")
        )
        item = old_data[index]
        assert item["episode_index"] == episode
        assert item["frame_index"] == frame
        assert item["task"] == reader.tasks[task]


def test_chunks_and_batches_of_any_length_store_the_same_rows(
    build: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from craftcli.cache.build import build as module

    whole = CacheReader.open(build(tmp_path / "a.zarr", samples=11, batch_size=4))
    monkeypatch.setattr(module, "rows_per_chunk", lambda widest, rows, target: 3)
    pieces = CacheReader.open(build(tmp_path / "b.zarr", samples=11, batch_size=2))
    assert (whole.manifest.chunk_count, pieces.manifest.chunk_count) == (1, 4)
    for name in whole.array_names():
        np.testing.assert_allclose(whole.read_all(name), pieces.read_all(name), rtol=0, atol=1e-3)


def test_action_tokens_are_stored_only_where_they_are_read(
    build: Callable[..., Path], tmp_path: Path
) -> None:
    names = CacheReader.open(
        build(tmp_path / "a.zarr", kind="hidden", pooling=Pooling.VISION_TEXT, samples=4)
    ).array_names()
    assert "inputs/observation.language.tokens" in names
    assert not [name for name in names if name.startswith("inputs/action")]


def test_progress_counts_every_row(teacher: Any, old_data: Any, tmp_path: Path) -> None:
    plans: list[BuildPlan] = []
    done: list[int] = []
    output = tmp_path / "a.zarr"
    config = CacheConfig(output=output, samples=10, batch_size=4, images=Images.EMBED)
    build_cache(config, teacher, old_data, on_plan=plans.append, on_rows=done.append)
    assert done == [4, 4, 2]
    (plan,) = plans
    size = sum(f.stat().st_size for f in output.rglob("c/**/*") if f.is_file())
    assert plan.size.total_bytes == pytest.approx(size, rel=0.25)
