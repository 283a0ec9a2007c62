"""Caches built in an object store: the bytes of a local one, also after a break."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made.remote_cache import (
    CHUNKS,
    Bucket,
    StoppedError,
    build,
    make_begun,
    raw,
    rows_of,
    stop_before,
    tree,
)

from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage import remote_folder
from craftcli.cache.storage.base import UnreachableStoreError
from craftcli.cache.storage.by_location import open_destination
from craftcli.cache.storage.remote_folder import Patience
from craftcli.cache.writing import writer as writer_module
from craftcli.errors import CraftError
from craftcli.locations import RemotePath


def test_a_remote_cache_has_the_bytes_of_a_local_one(path: RemotePath, local: Path) -> None:
    build(path)
    assert tree(path) == tree(local)
    reader = CacheReader.open(path)
    assert reader.verify() == []
    assert reader.size_on_disk() == sum(map(len, tree(path).values()))
    assert reader.modified().tzinfo is not None


@settings(deadline=None, derandomize=True, max_examples=4)
@given(
    rows=st.integers(1, 9),
    chunk=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    memory=st.sampled_from(["ram", "mmap"]),
    data=st.data(),
)
def test_what_is_written_is_what_is_read(
    bucket: Bucket, rows: int, chunk: int, dtype: str, memory: str, data: st.DataObject
) -> None:
    manifest = make_begun(rows=rows, rows_per_chunk=chunk, dtype=dtype)
    path = bucket.new_path()
    build(path, manifest)
    wanted = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=8)), np.int64)
    reader = CacheReader.open(path, memory=memory)
    for name in reader.array_names():
        parts = [rows_of(manifest, number)[name] for number in range(manifest.chunk_count)]
        written = np.concatenate(parts)
        np.testing.assert_array_equal(reader.read(name, wanted), written[wanted])
        np.testing.assert_array_equal(reader.read_all(name), written)


@pytest.mark.parametrize("stopped", [1, 2])
def test_a_broken_off_build_is_resumed_to_the_same_bytes(
    path: RemotePath, local: Path, stopped: int
) -> None:
    with pytest.raises(StoppedError):
        build(path, before_chunk=stop_before(stopped))
    with pytest.raises(CraftError, match="incomplete") as refused:
        CacheReader.open(path)
    assert "--resume" in refused.value.fix
    assert (
        str(open_destination(path).interrupted_build()) == f"{stopped} of {CHUNKS} chunks in {path}"
    )
    with pytest.raises(CraftError, match="half-built"):
        build(path)
    assert build(path, resume=True) == set(range(stopped))
    assert tree(path) == tree(local)


@pytest.mark.parametrize("step", ["stats_chunks", "update_manifest"])
def test_a_build_that_breaks_off_while_it_finishes_is_resumed(
    path: RemotePath, local: Path, step: str
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, step, stop)
        with pytest.raises(StoppedError):
            build(path)
    with pytest.raises(CraftError, match="incomplete"):
        CacheReader.open(path)
    assert build(path, resume=True) == set(range(CHUNKS))
    assert tree(path) == tree(local)


def test_a_payload_without_its_record_is_computed_again(path: RemotePath, local: Path) -> None:
    with pytest.raises(StoppedError):
        build(path, before_chunk=stop_before(2))
    obstore.delete(raw(path), "commit/c/1")
    obstore.put(raw(path), "inputs/image/c/0/0/0/0", b"half")
    assert build(path, resume=True) == set()
    assert tree(path) == tree(local)


def test_a_build_with_other_settings_is_not_continued(path: RemotePath) -> None:
    with pytest.raises(StoppedError):
        build(path, before_chunk=stop_before(2))
    with pytest.raises(CraftError, match="other values of seed"):
        build(path, make_begun(seed=1), resume=True)
    build(path, make_begun(seed=1), overwrite=True)
    assert CacheReader.open(path).manifest.seed == 1


def test_a_cache_is_replaced_only_when_asked(uploaded: RemotePath) -> None:
    obstore.put(raw(uploaded), "hidden/vlm.1/c/0/0/0", b"of more layers")
    before = tree(uploaded)
    with pytest.raises(CraftError, match="already exists"):
        build(uploaded)
    assert tree(uploaded) == before
    with pytest.raises(StoppedError):
        build(uploaded, overwrite=True, before_chunk=stop_before(0))
    # There is no moving aside in a store: what was to be replaced is gone.
    assert tree(uploaded) == {}


def test_nothing_but_caches_is_replaced(path: RemotePath) -> None:
    obstore.put(raw(path), "thesis.pdf", b"years of work")
    with pytest.raises(CraftError, match="not a craft cache"):
        build(path, overwrite=True)
    assert tree(path) == {"thesis.pdf": b"years of work"}


def test_a_store_that_goes_away_stops_the_build_which_then_resumes(
    bucket: Bucket, path: RemotePath, local: Path
) -> None:
    def switch_off(chunk: int) -> None:
        if chunk == 1:
            bucket.stop()

    try:
        with pytest.raises(UnreachableStoreError, match="cannot be reached") as gone:
            build(path, before_chunk=switch_off)
        assert "--resume" in gone.value.fix
    finally:
        bucket.start()
    with pytest.raises(CraftError, match="incomplete"):
        CacheReader.open(path)
    assert build(path, resume=True) == {0}
    assert tree(path) == tree(local)


def test_an_outage_of_some_seconds_is_waited_out(
    bucket: Bucket, path: RemotePath, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests were once given up after ten attempts, which is two seconds."""
    monkeypatch.setattr(remote_folder, "PATIENCE", Patience())
    restarts = []

    def switch_off(chunk: int) -> None:
        if chunk == 1:
            bucket.stop()
            restarts.append(threading.Timer(4.5, bucket.start))
            restarts[0].start()

    build(path, before_chunk=switch_off)
    restarts[0].join()
    assert tree(path) == tree(local)


def test_objects_of_the_user_are_not_removed(uploaded: RemotePath) -> None:
    obstore.put(raw(uploaded), "notes.txt", b"mine")
    before = tree(uploaded)
    with pytest.raises(CraftError, match=r"files that craft did not write.*notes\.txt"):
        build(uploaded, overwrite=True)
    assert tree(uploaded) == before
