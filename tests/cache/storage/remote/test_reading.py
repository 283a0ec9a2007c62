"""Rows fetched from an object store, checked before they are used."""

import numpy as np
import obstore
import pytest
from made.remote_cache import Bucket, build, expected, make_begun, raw, tree

from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.base import UnreachableStoreError
from craftcli.cache.storage.remote_folder import RemoteFolder
from craftcli.errors import CraftError
from craftcli.locations import RemotePath


def test_a_store_that_goes_away_stops_a_reader(bucket: Bucket, uploaded: RemotePath) -> None:
    reader = CacheReader.open(uploaded)
    bucket.stop()
    try:
        with pytest.raises(UnreachableStoreError, match="cannot be reached"):
            reader.read("valid", np.array([0]))
    finally:
        bucket.start()
    # Nothing of the failure is kept.
    np.testing.assert_array_equal(reader.read_all("valid"), expected("valid"))


@pytest.mark.parametrize("memory", ["ram", "mmap"])
@pytest.mark.parametrize("name", ["hidden/vlm.3/c/1/0/0", "commit/c/1", "valid/c/1"])
def test_a_flipped_bit_is_found_before_the_row_is_used(
    uploaded: RemotePath, name: str, memory: str
) -> None:
    data = bytearray(tree(uploaded)[name])
    data[len(data) // 2] ^= 4
    obstore.put(raw(uploaded), name, bytes(data))
    reader = CacheReader.open(uploaded, memory=memory)
    (problem,) = reader.verify()
    array = name.partition("/c/")[0]
    assert problem.startswith(f"{array} chunk 1 (rows ")
    asked = "hidden/vlm.3" if array == "commit" else array
    with pytest.raises(CraftError, match=f"{array} chunk 1"):
        reader.read(asked, np.array([0, 4]))
    reader.read(asked, np.array([0, 7]))


def test_a_lost_or_short_object_is_found(uploaded: RemotePath) -> None:
    obstore.delete(raw(uploaded), "inputs/image/c/0/0/0/0")
    obstore.put(raw(uploaded), "hidden_mask/c/2/0", b"short")
    problems = CacheReader.open(uploaded).verify()
    assert problems == [
        "inputs/image chunk 0 (rows 0 to 2): the object is missing",
        "hidden_mask chunk 2 (rows 6 to 7): the object has 5 bytes instead of 10",
    ]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The objects that are fetched from now on."""
    names: list[str] = []
    read = RemoteFolder.read

    def noted(self: RemoteFolder, name: str) -> bytes | None:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(RemoteFolder, "read", noted)
    return names


def test_chunks_are_fetched_ahead_and_once(uploaded: RemotePath, fetched: list[str]) -> None:
    reader = CacheReader.open(uploaded, memory="mmap")
    rows = np.array([0, 6, 7])
    reader.prefetch(rows, ["hidden/vlm.3", "inputs/image"])
    for name in ("hidden/vlm.3", "inputs/image"):
        np.testing.assert_array_equal(reader.read(name, rows), expected(name)[rows])
    chunks = [name for name in fetched if name.startswith(("hidden", "inputs"))]
    assert sorted(chunks) == sorted(
        [f"hidden/vlm.3/c/{chunk}/0/0" for chunk in (0, 2)]
        + [f"inputs/image/c/{chunk}/0/0/0" for chunk in (0, 2)]
    )


def test_one_chunk_is_kept_when_memory_is_short(
    uploaded: RemotePath, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("craftcli.cache.reading.reader.free_bytes", lambda: 0)
    reader = CacheReader.open(uploaded)
    assert reader.memory == "mmap"
    rows = np.array([7, 0, 4, 7, 1])
    for _ in range(2):
        read = reader.read("hidden/vlm.3", rows)
        np.testing.assert_array_equal(read, expected("hidden/vlm.3")[rows])
    # Each round fetches all three chunks again; only the last one would be there.
    assert sum(name.startswith("hidden/vlm.3/c/") for name in fetched) == 2 * 3
    read = reader.read("hidden/vlm.3", np.array([7, 6]))
    assert sum(name.startswith("hidden/vlm.3/c/") for name in fetched) == 2 * 3


def test_a_cache_that_is_replaced_under_a_reader_is_noticed(uploaded: RemotePath) -> None:
    reader = CacheReader.open(uploaded)
    build(uploaded, make_begun(seed=7), overwrite=True)
    with pytest.raises(CraftError, match="replaced or removed"):
        reader.read("valid", np.array([0]))


def test_nothing_there_and_no_such_bucket(path: RemotePath, bucket: Bucket) -> None:
    with pytest.raises(CraftError, match="nothing is there"):
        CacheReader.open(path)
    with pytest.raises(UnreachableStoreError, match="cannot be reached"):
        build(RemotePath("s3://nobodys-bucket/a.zarr"))
