"""What is written is read, by craft and by stock zarr."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from made.manifests import make_manifest
from made.small_cache import TASKS, make_arrays, make_rows, write

from craftcli.cache.dtypes import decode
from craftcli.cache.format import Manifest, layer_names
from craftcli.cache.reading.reader import CacheReader
from craftcli.errors import CraftError


@settings(deadline=None, derandomize=True, max_examples=15)
@given(
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    rows=st.integers(1, 13),
    chunk=st.integers(1, 14),
    vectors=st.integers(1, 3),
    dim=st.integers(1, 5),
    packed=st.sampled_from([None, ("hidden/vlm.2",), ("hidden/vlm.2", "hidden/vlm.3")]),
    data=st.data(),
)
def test_what_is_written_is_read(
    dtype: str,
    rows: int,
    chunk: int,
    vectors: int,
    dim: int,
    packed: tuple[str, ...] | None,
    data: st.DataObject,
) -> None:
    manifest = make_manifest(
        rows=rows,
        rows_per_chunk=min(rows, chunk),
        vectors=vectors,
        dim=dim,
        dtype=dtype,
        packed=packed,
        format_version="2.0" if packed else "1.3",
    )
    order = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=20)), np.int64)
    written = make_rows(manifest)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "anchors.zarr"
        write(path, manifest, written)
        assert os.listdir(folder) == ["anchors.zarr"]
        reader = CacheReader.open(path)
        digests = {name: reader.stats(name).digest() for name in layer_names(manifest)}
        assert reader.manifest == replace(manifest, complete=True, stats_digests=digests)
        assert reader.array_names() == sorted(written)
        for name, values in written.items():
            assert reader.spec(name) == make_arrays(manifest)[name]
            for got, expected in [
                (reader.read(name, order), values[order]),
                (reader.read_all(name), values),
            ]:
                assert got.dtype == expected.dtype
                np.testing.assert_array_equal(got, expected)
        assert reader.verify() == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stock_zarr_reads_the_documented_names(tmp_path: Path, dtype: str) -> None:
    manifest = make_manifest(dtype=dtype)
    rows = make_rows(manifest)
    write(tmp_path / "a.zarr", manifest, rows)
    group = zarr.open_group(tmp_path / "a.zarr", mode="r")
    stored = Manifest.from_json(group.attrs["craft"])
    assert stored.stats_digests
    assert replace(stored, stats_digests=None) == manifest
    assert group.attrs["tasks"] == TASKS
    found = {name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    statistics = {
        f"stats/vlm.{layer}/{name}" for layer in (2, 3) for name in ("mean", "variance", "count")
    }
    assert found == set(rows) | statistics | {"commit"}
    for name, values in rows.items():
        array = group[name]
        assert isinstance(array, zarr.Array)
        np.testing.assert_array_equal(array[:], values)
        assert array.chunks == (4, *values.shape[1:])
        bfloat16 = dtype == "bfloat16" and name.startswith("hidden/")
        assert array.attrs.asdict() == ({"craft_dtype": "bfloat16"} if bfloat16 else {})


def test_statistics_cover_the_targets_of_valid_rows(tmp_path: Path) -> None:
    manifest = make_manifest(dtype="float16")
    rows = make_rows(manifest)
    rows["hidden/vlm.3"][~rows["valid"]] = np.nan
    write(tmp_path / "a.zarr", manifest, rows)
    stats = CacheReader.open(tmp_path / "a.zarr").stats("vlm.3")
    hidden = decode(rows["hidden/vlm.3"], "float16").astype(np.float64)
    for position in range(2):
        kept = hidden[rows["valid"] & rows["hidden_mask"][:, position], position]
        assert stats.count[position] == len(kept)
        np.testing.assert_allclose(stats.mean[position], kept.mean(axis=0))
        np.testing.assert_allclose(stats.variance[position], kept.var(axis=0))


def test_all_zero_chunks_have_files(tmp_path: Path) -> None:
    manifest = make_manifest()
    rows = {name: np.zeros_like(values) for name, values in make_rows(manifest).items()}
    write(tmp_path / "a.zarr", manifest, rows)
    assert CacheReader.open(tmp_path / "a.zarr").verify() == []


def test_a_cache_without_hidden_states_has_no_statistics(tmp_path: Path) -> None:
    manifest = make_manifest(kinds=("token_ce",), layers=())
    write(tmp_path / "a.zarr", manifest, make_rows(manifest))
    reader = CacheReader.open(tmp_path / "a.zarr")
    assert "hidden_mask" not in reader.array_names()
    assert reader.verify() == []


def test_the_size_is_that_of_the_files(cache: Path) -> None:
    size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    assert CacheReader.open(cache).size_on_disk() == size


@pytest.mark.parametrize("rows", [[-1], [10], [0, 99]])
def test_rows_outside_are_refused(cache: Path, rows: list[int]) -> None:
    with pytest.raises(IndexError):
        CacheReader.open(cache).read("valid", np.array(rows))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint64"])
@pytest.mark.parametrize("rows", [[6, 4, 6], [9, 0, 9]])
def test_rows_may_have_any_integer_dtype(cache: Path, rows: list[int], dtype: str) -> None:
    got = CacheReader.open(cache).read("hidden/vlm.3", np.array(rows, dtype))
    np.testing.assert_array_equal(got, make_rows(make_manifest())["hidden/vlm.3"][rows])
    # What was read is a copy: neither the file nor another batch can change with it.
    got[:] = 0


@pytest.mark.parametrize("rows", [np.array([True, False]), np.array([0.0]), np.array([[0]])])
def test_rows_must_be_integers(cache: Path, rows: npt.NDArray[Any]) -> None:
    with pytest.raises(TypeError):
        CacheReader.open(cache).read("valid", rows)


def test_an_unknown_array_is_answered_with_the_closest(cache: Path) -> None:
    with pytest.raises(CraftError, match=r"read inputs/action\.tokens"):
        CacheReader.open(cache).read_all("inputs/action.token")
