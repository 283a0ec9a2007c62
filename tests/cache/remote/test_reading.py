"""Rows fetched from an object store, checked before they are used."""

import numpy as np
import obstore
import pytest
from made.remote_cache import Bucket, build, expected, make_begun, raw, tree

from craftcli.cache.reader import CacheReader
from craftcli.cache.remote import RemoteFolder, StoreGoneError
from craftcli.errors import CraftError
from craftcli.locations import RemotePath


def test_a_store_that_goes_away_stops_a_reader(bucket: Bucket, uploaded: RemotePath) -> None:
    reader = CacheReader.open(uploaded)
    bucket.stop()
    try:
        with pytest.raises(StoreGoneError, match="cannot be reached"):
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


def test_chunks_are_fetched_ahead_and_once(
    uploaded: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = CacheReader.open(uploaded, memory="mmap")
    fetched: list[str] = []
    read = RemoteFolder.read

    def counted(self: RemoteFolder, name: str) -> bytes | None:
        fetched.append(name)
        return read(self, name)

    monkeypatch.setattr(RemoteFolder, "read", counted)
    rows = np.array([0, 6, 7])
    reader.prefetch(rows, ["hidden/vlm.3", "inputs/image"])
    for name in ("hidden/vlm.3", "inputs/image"):
        np.testing.assert_array_equal(reader.read(name, rows), expected(name)[rows])
    chunks = [name for name in fetched if name.startswith(("hidden", "inputs"))]
    assert sorted(chunks) == sorted(
        [f"hidden/vlm.3/c/{chunk}/0/0" for chunk in (0, 2)]
        + [f"inputs/image/c/{chunk}/0/0/0" for chunk in (0, 2)]
    )


def test_few_chunks_are_kept_when_memory_is_short(
    uploaded: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("craftcli.cache.reader.free_bytes", lambda: 0)
    reader = CacheReader.open(uploaded)
    assert reader.memory == "mmap"
    rows = np.array([7, 0, 4, 7, 1])
    for _ in range(2):
        read = reader.read("hidden/vlm.3", rows)
        np.testing.assert_array_equal(read, expected("hidden/vlm.3")[rows])
    assert len(reader._rows["hidden/vlm.3"]._kept) == 1  # type: ignore[attr-defined]


def test_a_cache_that_is_replaced_under_a_reader_is_noticed(uploaded: RemotePath) -> None:
    reader = CacheReader.open(uploaded)
    build(uploaded, make_begun(seed=7), overwrite=True)
    with pytest.raises(CraftError, match="replaced or removed"):
        reader.read("valid", np.array([0]))


def test_nothing_there_and_no_such_bucket(path: RemotePath, bucket: Bucket) -> None:
    with pytest.raises(CraftError, match="nothing is there"):
        CacheReader.open(path)
    with pytest.raises(StoreGoneError, match="cannot be reached"):
        build(RemotePath("s3://nobodys-bucket/a.zarr"))
