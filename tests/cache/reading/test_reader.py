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
from craftcli.cache.reading.rows import ContiguousRows, ScatteredRows, rows_in_files
from craftcli.cache.storage.chunk_files import ChunkFiles
from craftcli.cache.storage.zarr_layout import open_cache
from craftcli.errors import CraftError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODES = ["ram", "mmap"]
Values = npt.NDArray[Any]


def write(path: Path, *, rows: int = 20, dim: int = 128, chunk: int = 8, shift: int = 0) -> Values:
    """A cache of two layers [rows, 2, dim] float16; its hidden states."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from synthetic import activations, write_cache
    finally:
        sys.path.remove(str(BENCHMARKS))
    hidden: Values = activations(rows, 2, dim) + np.float16(shift)
    tokens = np.arange(rows * 3).reshape(rows, 3) + shift
    write_cache(path, hidden, {"inputs/tokens": tokens}, chunk=chunk)
    return hidden


@pytest.fixture(scope="module", autouse=True)
def _no_sync() -> Iterator[None]:
    """These caches need not survive a power cut, and waiting for the disk is most of their time."""
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
    # With 512 every chunk is whole pages, which are mapped side by side.
    dim=st.sampled_from([1, 3, 512]),
    memory=st.sampled_from(MODES),
    data=st.data(),
)
def test_what_is_written_is_read_in_every_mode(
    rows: int, chunk: int, dim: int, memory: str, data: st.DataObject
) -> None:
    orders = data.draw(st.lists(st.lists(st.integers(0, rows - 1), max_size=9), max_size=5))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.zarr"
        hidden = write(path, rows=rows, dim=dim, chunk=min(rows, chunk))
        reader = CacheReader.open(path, memory=memory)
        for order in orders:
            got = reader.read("hidden/vlm.17", np.array(order, np.int64))
            assert got.dtype == np.float16
            np.testing.assert_array_equal(got, hidden[order, 1])
            # A batch is a copy of its own, whatever the rows are kept in.
            got[:] = 0
        np.testing.assert_array_equal(reader.read_all("hidden/vlm.16"), hidden[:, 0])
        np.testing.assert_array_equal(reader.read_all("index/frame"), np.arange(rows))
        reader.read_all("hidden/vlm.17")[:] = 0
        np.testing.assert_array_equal(reader.read_all("hidden/vlm.17"), hidden[:, 1])


@pytest.mark.parametrize(("dim", "kind"), [(512, ContiguousRows), (513, ScatteredRows)])
def test_only_whole_pages_are_mapped_side_by_side(
    tmp_path: Path, dim: int, kind: type[ContiguousRows | ScatteredRows]
) -> None:
    path = tmp_path / "a.zarr"
    hidden = write(path, dim=dim)
    files = open_cache(path).chunks["hidden/vlm.16"]
    assert isinstance(files, ChunkFiles)
    rows = rows_in_files(files, lambda _: None, limit=10)
    assert isinstance(rows, kind)
    order = np.array([19, 0, 9], np.intp)
    np.testing.assert_array_equal(rows.read(order), hidden[order, 0])


@pytest.mark.parametrize("dim", [512, 513])
@pytest.mark.parametrize("memory", MODES)
def test_wide_arrays_are_mapped_and_narrow_ones_copied(
    tmp_path: Path, dim: int, memory: str
) -> None:
    path = tmp_path / "a.zarr"
    write(path, dim=dim)
    reader = CacheReader.open(path, memory=memory)
    for name in ("hidden/vlm.16", "inputs/tokens", "index/frame"):
        reader.read(name, np.arange(20))
    mapped = Path("/proc/self/maps").read_text()
    assert (f"{path}/hidden/vlm.16/" in mapped) is (memory == "mmap")
    assert (f"{path}/inputs/tokens/" in mapped) is (memory == "mmap")
    assert f"{path}/index/frame/" not in mapped


@pytest.mark.parametrize(("spare", "memory"), [(0, "ram"), (-1, "mmap")])
@pytest.mark.parametrize("processes", [None, 2])
def test_rows_go_to_memory_when_they_fit_into_a_quarter(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    spare: int,
    memory: str,
    processes: int | None,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    payload = CacheReader.open(cache).payload_bytes
    # Two layers, tokens, four indices, hidden_mask and valid.
    assert payload == 20 * (2 * 512 + 24 + 4 * 8 + 2 + 1)
    free = payload * 4 * (processes or 1) + spare
    monkeypatch.setattr(reader_module, "free_bytes", lambda: free)
    assert CacheReader.open(cache).memory == memory


def test_an_unknown_mode_is_refused(cache: Path) -> None:
    with pytest.raises(ValueError, match="not one of auto, ram, mmap"):
        CacheReader.open(cache, memory="disk")


@pytest.mark.parametrize("memory", MODES)
def test_reading_holds_no_file_open(cache: Path, memory: str) -> None:
    reader = CacheReader.open(cache, memory=memory)
    before = len(os.listdir("/proc/self/fd"))
    batches = [reader.read_all(name) for name in reader.array_names()]
    assert len(os.listdir("/proc/self/fd")) == before
    del batches


def test_in_memory_a_file_is_read_once(cache: Path) -> None:
    reader = CacheReader.open(cache, memory="ram")
    before = reader.read_all("hidden/vlm.16")
    shutil.rmtree(cache)
    np.testing.assert_array_equal(reader.read("hidden/vlm.16", np.arange(20)), before)


@pytest.mark.parametrize("dim", [512, 513])
def test_no_more_chunks_are_mapped_than_allowed(
    tmp_path: Path, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.zarr"
    hidden = write(path, dim=dim, chunk=2)
    names = CacheReader.open(path).array_names()
    monkeypatch.setattr(reader_module, "MAX_MAPPINGS", 3 * len(names))
    reader = CacheReader.open(path, memory="mmap")
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(20), 3))
    np.testing.assert_array_equal(reader.read("hidden/vlm.16", order), hidden[order, 0])
    np.testing.assert_array_equal(reader.read_all("hidden/vlm.16"), hidden[:, 0])
    assert str(path) in Path("/proc/self/maps").read_text()
    assert Path("/proc/self/maps").read_text().count(f"{path}/hidden/vlm.16/") <= 3


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("dim", [512, 513])
def test_a_chunk_of_other_rows_is_refused(tmp_path: Path, dim: int, memory: str) -> None:
    path = tmp_path / "a.zarr"
    write(path, dim=dim)
    shutil.copy(path / "hidden/vlm.16/c/0/0/0", path / "hidden/vlm.16/c/1/0/0")
    reader = CacheReader.open(path, memory=memory)
    reader.read("hidden/vlm.16", np.arange(8))
    for name in ("hidden/vlm.16", "index/frame"):
        with pytest.raises(
            CraftError, match=r"commit chunk 1 \(rows 8 to 15\).* changed or swapped"
        ):
            reader.read(name, np.array([8]))


@pytest.mark.parametrize("memory", MODES)
def test_the_error_names_the_file_that_is_bad(cache: Path, memory: str) -> None:
    file = cache / "inputs/tokens/c/1/0"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    # Its checksum is under the commit record, so that no array of the chunk can be trusted.
    for name in ("inputs/tokens", "hidden/vlm.16"):
        with pytest.raises(CraftError, match=r"inputs/tokens chunk 1 .*checksum does not match"):
            CacheReader.open(cache, memory=memory).read(name, np.array([9]))


@pytest.mark.parametrize("memory", MODES)
def test_damage_stays_an_error(cache: Path, memory: str) -> None:
    file = cache / "hidden/vlm.16/c/1/0/0"
    good = file.read_bytes()
    file.write_bytes(b"?" + good[1:])
    reader = CacheReader.open(cache, memory=memory)
    for _ in range(2):
        with pytest.raises(CraftError, match="checksum does not match"):
            reader.read("hidden/vlm.16", np.array([0, 9]))
    file.write_bytes(good)
    assert reader.read("hidden/vlm.16", np.array([0, 9])).shape == (2, 2, 128)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("dim", [512, 513])
def test_rows_of_a_cache_that_took_its_place_are_never_read(
    tmp_path: Path, dim: int, memory: str
) -> None:
    path = tmp_path / "a.zarr"
    hidden = write(path, dim=dim)
    reader = CacheReader.open(path, memory=memory)
    reader.read("hidden/vlm.16", np.arange(8))
    shutil.rmtree(path)
    with pytest.raises(CraftError, match="replaced or removed"):
        reader.read("hidden/vlm.16", np.array([9]))
    write(path, dim=dim, shift=1)
    np.testing.assert_array_equal(reader.read("hidden/vlm.16", np.array([3])), hidden[3:4, 0])
    with pytest.raises(CraftError, match="replaced or removed"):
        reader.read("hidden/vlm.16", np.array([3, 9]))
    # The chunk is known, but not this array of it.
    with pytest.raises(CraftError, match="was replaced while the cache was open"):
        reader.read("hidden/vlm.17", np.array([3]))


@pytest.mark.parametrize("memory", MODES)
def test_threads_share_a_reader(tmp_path: Path, memory: str) -> None:
    hidden = write(tmp_path / "a.zarr", rows=64, chunk=8)
    reader = CacheReader.open(tmp_path / "a.zarr", memory=memory)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for row in np.random.default_rng(seed).permutation(64):
            if (reader.read("hidden/vlm.16", np.array([row]))[0] != hidden[row, 0]).any():
                wrong.append(int(row))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_mode_is_shown(cache: Path) -> None:
    assert "rows=20" in repr(CacheReader.open(cache, memory="mmap"))
    assert "memory='mmap'" in repr(CacheReader.open(cache, memory="mmap"))


@pytest.mark.parametrize("dim", [3, 512])
def test_a_mapped_file_that_becomes_shorter_is_an_error(tmp_path: Path, dim: int) -> None:
    """Reading past its end would kill the process."""
    hidden = write(tmp_path / "a", dim=dim)
    reader = CacheReader.open(tmp_path / "a", memory="mmap")
    rows = np.arange(20)
    np.testing.assert_array_equal(reader.read("hidden/vlm.17", rows), hidden[:, 1])
    os.truncate(tmp_path / "a/hidden/vlm.17/c/1/0/0", 0)
    for read in (
        lambda: reader.read("hidden/vlm.17", rows),
        lambda: reader.read_all("hidden/vlm.17"),
    ):
        with pytest.raises(CraftError, match=r"hidden/vlm.17 chunk 1 .*made shorter"):
            read()
    np.testing.assert_array_equal(reader.read("hidden/vlm.17", rows[:8]), hidden[:8, 1])


def test_a_mapped_file_that_is_removed_can_still_be_read(tmp_path: Path) -> None:
    hidden = write(tmp_path / "a")
    reader = CacheReader.open(tmp_path / "a", memory="mmap")
    reader.read_all("hidden/vlm.17")
    (tmp_path / "a/hidden/vlm.17/c/1/0/0").unlink()
    np.testing.assert_array_equal(reader.read("hidden/vlm.17", np.arange(20)), hidden[:, 1])
