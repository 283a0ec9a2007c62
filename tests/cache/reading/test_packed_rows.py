"""Packed rows are read as whole ones are: in memory and mapped, by threads, and over damage."""

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craftcli.cache.reading import reader as reader_module
from craftcli.cache.reading.reader import CacheReader
from craftcli.errors import CraftError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODES = ["ram", "mmap"]
SLOTS, DIM = 24, 64
LAYER = "hidden/vlm.16"
Values = npt.NDArray[Any]


def write(path: Path, *, rows: int = 20, chunk: int = 8, packed: bool = True) -> Values:
    """A cache of two layers [rows, SLOTS, DIM] float16 with 0 to SLOTS tokens; its states."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from synthetic import activations, write_cache
    finally:
        sys.path.remove(str(BENCHMARKS))
    hidden: Values = activations(rows, SLOTS, DIM)
    for row, states in enumerate(hidden):
        states[:, row * 5 % (SLOTS + 1) :] = 0
    write_cache(path, hidden, chunk=chunk, packed=packed)
    return hidden


@pytest.fixture(scope="module", autouse=True)
def _no_sync() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    write(tmp_path / "anchors.zarr")
    return tmp_path / "anchors.zarr"


@settings(deadline=None, derandomize=True, max_examples=12)
@given(
    rows=st.integers(1, 20),
    chunk=st.integers(1, 20),
    memory=st.sampled_from(MODES),
    data=st.data(),
)
def test_what_is_written_is_read_in_every_mode(
    rows: int, chunk: int, memory: str, data: st.DataObject
) -> None:
    orders = data.draw(st.lists(st.lists(st.integers(0, rows - 1), max_size=9), max_size=5))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.zarr"
        hidden = write(path, rows=rows, chunk=min(rows, chunk))
        reader = CacheReader.open(path, memory=memory)
        for order in orders:
            got = reader.read("hidden/vlm.17", np.array(order, np.int64))
            assert got.dtype == np.float16
            np.testing.assert_array_equal(got, hidden[order, 1])
            got[:] = 0
        np.testing.assert_array_equal(reader.read_all(LAYER), hidden[:, 0])
        assert reader.verify() == []


def test_packing_changes_nothing_but_the_size(tmp_path: Path) -> None:
    paths = {packed: tmp_path / f"{packed}.zarr" for packed in (False, True)}
    for packed, path in paths.items():
        write(path, packed=packed)
    whole, packed_rows = (CacheReader.open(paths[packed]) for packed in (False, True))
    for name in whole.array_names():
        np.testing.assert_array_equal(whole.read_all(name), packed_rows.read_all(name))
    for layer in ("vlm.16", "vlm.17"):
        assert whole.stats(layer).digest() == packed_rows.stats(layer).digest()
    assert (whole.manifest.format_version, packed_rows.manifest.format_version) == ("1.3", "2.0")
    assert packed_rows.row_bytes() < 0.7 * whole.row_bytes()
    assert packed_rows.size_on_disk() < 0.8 * whole.size_on_disk()


@pytest.mark.parametrize("memory", MODES)
def test_rows_stay_packed_where_they_are_kept(cache: Path, memory: str) -> None:
    reader = CacheReader.open(cache, memory=memory)
    before = reader.read(LAYER, np.arange(20))
    mapped = f"{cache}/{LAYER}/" in Path("/proc/self/maps").read_text()
    assert mapped is (memory == "mmap")
    shutil.rmtree(cache)
    # A mapping keeps a file that was removed.
    np.testing.assert_array_equal(reader.read(LAYER, np.arange(20)), before)


def test_no_more_chunks_are_mapped_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.zarr"
    hidden = write(path, chunk=2)
    names = CacheReader.open(path).array_names()
    monkeypatch.setattr(reader_module, "MAX_MAPPINGS", 3 * len(names))
    reader = CacheReader.open(path, memory="mmap")
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(20), 3))
    np.testing.assert_array_equal(reader.read(LAYER, order), hidden[order, 0])
    assert 1 <= Path("/proc/self/maps").read_text().count(f"{path}/{LAYER}/") <= 3


@pytest.mark.parametrize("memory", MODES)
def test_a_lost_file_is_no_row_of_zeros(cache: Path, memory: str) -> None:
    (cache / LAYER / "c/1/0/0").unlink()
    reader = CacheReader.open(cache, memory=memory)
    reader.read(LAYER, np.arange(8))
    for name in (LAYER, "index/frame"):
        with pytest.raises(CraftError, match=r"vlm.16 chunk 1 .*the file is missing"):
            reader.read(name, np.array([9]))
    assert len(reader.verify()) == 1


@pytest.mark.parametrize("memory", MODES)
def test_a_chunk_of_other_rows_is_refused(cache: Path, memory: str) -> None:
    shutil.copy(cache / LAYER / "c/0/0/0", cache / LAYER / "c/1/0/0")
    reader = CacheReader.open(cache, memory=memory)
    with pytest.raises(CraftError, match=r"commit chunk 1 .* changed or swapped"):
        reader.read(LAYER, np.array([8]))


def test_lost_statistics_are_no_zeros(cache: Path) -> None:
    (cache / "stats/vlm.16/mean/c/0/0").unlink()
    with pytest.raises(CraftError, match=r"stats/vlm.16/mean chunk 0 .*the file is missing"):
        CacheReader.open(cache).stats("vlm.16")


def test_a_file_that_shrinks_while_it_is_mapped_is_an_error(cache: Path) -> None:
    reader = CacheReader.open(cache, memory="mmap")
    reader.read(LAYER, np.arange(8))
    os.truncate(cache / LAYER / "c/0/0/0", 100)
    with pytest.raises(CraftError, match="made shorter while the cache was open"):
        reader.read(LAYER, np.arange(8))


@pytest.mark.parametrize("memory", MODES)
def test_threads_read_the_same_rows(tmp_path: Path, memory: str) -> None:
    path = tmp_path / "a.zarr"
    hidden = write(path, chunk=2)
    reader = CacheReader.open(path, memory=memory)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            rows = rng.integers(0, 20, 6)
            if not np.array_equal(reader.read(LAYER, rows), hidden[rows, 0]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
