import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made.damage import empty, flip, truncate

from craftcli.cache.storage import chunk_files
from craftcli.cache.storage.chunk_files import ChunkFiles
from craftcli.cache.storage.chunks import ArraySpec, DamagedChunkError, commit_record


def checksum(payload: bytes) -> bytes:
    return int(google_crc32c.value(payload)).to_bytes(4, "little")


def write(root: Path, values: npt.NDArray[Any], chunk_rows: int, name: str = "a/b") -> ChunkFiles:
    """The files as the format describes them, by another way than craft's."""
    spec = ArraySpec(shape=values.shape[1:], dtype=str(values.dtype))
    files = ChunkFiles(root=root, name=name, rows=len(values), chunk_rows=chunk_rows, spec=spec)
    for chunk in range(-(-len(values) // chunk_rows)):
        rows = values[chunk * chunk_rows : (chunk + 1) * chunk_rows]
        payload = rows.astype(values.dtype.newbyteorder("<")).tobytes()
        payload += bytes((chunk_rows - len(rows)) * spec.row_bytes)
        files.file(chunk).parent.mkdir(parents=True, exist_ok=True)
        files.file(chunk).write_bytes(payload + checksum(payload))
    return files


@pytest.fixture
def files(tmp_path: Path) -> ChunkFiles:
    return write(tmp_path, np.arange(30, dtype=np.float32).reshape(10, 3), chunk_rows=4)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    rows=st.integers(1, 9),
    chunk_rows=st.integers(1, 10),
    shape=st.lists(st.integers(1, 3), max_size=3),
    dtype=st.sampled_from(["bool", "uint8", "uint16", "int64", "float16", "float64"]),
)
def test_chunks_joined_are_the_rows(
    rows: int, chunk_rows: int, shape: list[int], dtype: str
) -> None:
    values = np.random.default_rng(0).integers(0, 2, (rows, *shape)).astype(dtype)
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), values, chunk_rows)
        assert (files.shape, files.chunk_shape) == (values.shape, (chunk_rows, *shape))
        count = -(-rows // chunk_rows)
        joined = np.concatenate([files.load(chunk) for chunk in range(count)])
        assert joined.dtype == values.dtype
        np.testing.assert_array_equal(joined, values)
        copied = np.empty(files.shape, files.stored_dtype)
        for chunk in range(count):
            files.load_into(chunk, copied[chunk * chunk_rows : (chunk + 1) * chunk_rows])
        np.testing.assert_array_equal(copied, values)
        assert [files.damage(chunk) for chunk in range(count)] == [None] * count


def test_the_key_has_a_place_for_every_axis(files: ChunkFiles, tmp_path: Path) -> None:
    assert files.file(2) == tmp_path / "a/b/c/2/0"
    assert write(tmp_path, np.zeros(3), 1, "flat").file(2) == tmp_path / "flat/c/2"


def test_mapped_rows_cannot_be_changed(files: ChunkFiles) -> None:
    with pytest.raises(ValueError, match="read-only"):
        files.load(0)[0] = 1


def extend(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def replace_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (flip, "the checksum does not match"),
        (truncate, "the file has 45 bytes instead of 52"),
        (extend, "the file has 53 bytes instead of 52"),
        (empty, "the file has 0 bytes instead of 52"),
        (Path.unlink, "the file is missing"),
        (replace_by_a_folder, "the file cannot be read (Is a directory)"),
    ],
)
def test_damage_is_named(files: ChunkFiles, harm: Callable[[Path], None], problem: str) -> None:
    harm(files.file(2))
    assert files.damage(2) == f"a/b chunk 2 (rows 8 to 9): {problem}"
    assert files.damage(1) is None
    with pytest.raises(DamagedChunkError, match="rows 8 to 9"):
        files.load(2)


@pytest.mark.parametrize("piece_bytes", [1, 5, 16, 48, 49])
def test_a_file_is_read_piece_by_piece(
    files: ChunkFiles, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    expected = files.load(2).copy()
    monkeypatch.setattr(chunk_files, "PIECE_BYTES", piece_bytes)
    out = np.empty((2, 3), np.float32)
    files.load_into(2, out)
    np.testing.assert_array_equal(out, expected)
    assert files.damage(2) is None
    flip(files.file(2))
    assert files.damage(2)
    with pytest.raises(DamagedChunkError, match="checksum does not match"):
        files.load_into(2, out)


def test_a_sealed_chunk_must_have_that_checksum(files: ChunkFiles) -> None:
    out = np.empty((4, 3), np.float32)
    files.load(0, committed=files.checksum(0))
    files.load_into(0, out, committed=files.checksum(0))
    for load in (files.load, lambda chunk, **how: files.load_into(chunk, out, **how)):
        with pytest.raises(DamagedChunkError, match=r"rows 0 to 3\): it was replaced"):
            load(0, committed=files.checksum(1))
    with pytest.raises(DamagedChunkError, match="replaced"):
        files.load(0, check=False, committed=files.checksum(1))


def test_a_file_that_shrinks_while_it_is_read_is_damaged(
    files: ChunkFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate(files.file(0))
    sizes = SimpleNamespace(st_size=52)
    monkeypatch.setattr(os, "fstat", lambda _: sizes)
    assert files.damage(0) == "a/b chunk 0 (rows 0 to 3): the file cannot be read (it ended early)"


@pytest.mark.parametrize("harm", [truncate, Path.unlink])
def test_a_damaged_file_has_no_checksum(files: ChunkFiles, harm: Callable[[Path], None]) -> None:
    harm(files.file(1))
    with pytest.raises(DamagedChunkError, match="a/b chunk 1"):
        files.checksum(1)


def test_the_checksum_is_only_compared_when_asked(files: ChunkFiles) -> None:
    before = files.load(0).copy()
    flip(files.file(0))
    assert (files.load(0, check=False) != before).any()


def test_a_disk_error_is_damage(files: ChunkFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(Path, "open", fail)
    assert files.damage(0) == "a/b chunk 0 (rows 0 to 3): the file cannot be read (broken disk)"


def record_of(arrays: list[ChunkFiles], chunk: int) -> int:
    return commit_record(files.checksum(chunk) for files in arrays)


def test_a_commit_record_depends_on_every_array_and_on_their_order(tmp_path: Path) -> None:
    one, two = (write(tmp_path, np.full(4, value), 2, f"x{value}") for value in (1, 2))
    record = record_of([one, two], 0)
    assert record == google_crc32c.value(one.checksum(0) + two.checksum(0))
    assert record == record_of([one, two], 1)
    assert len({record, record_of([two, one], 0), record_of([one], 0)}) == 3


def test_a_commit_record_is_never_that_of_a_missing_chunk(files: ChunkFiles) -> None:
    assert google_crc32c.value(b"") == 0
    assert record_of([], 0) == 1


@pytest.mark.parametrize(("shape", "dtype"), [((0,), "int8"), ((), "U3"), ((2,), "object")])
def test_rows_are_numbers_on_non_empty_axes(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(ValueError, match="not numbers on non-empty axes"):
        ArraySpec(shape=shape, dtype=dtype)
    assert ArraySpec(shape=(2,), dtype=">f4") == ArraySpec(shape=(2,), dtype="float32")


def test_chunks_and_places_need_no_zarr() -> None:
    code = (
        "import sys, craftcli.cache.storage.chunk_files, craftcli.cache.storage.local_destination;"
        "assert not {'zarr', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
