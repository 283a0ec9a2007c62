"""Packed chunks: they hold every row, stock zarr reads them, and damage to them is found."""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from made.damage import empty, flip, truncate

from craftcli.cache.storage.chunks import ArraySpec, DamagedChunkError
from craftcli.cache.storage.local_folder import LocalFolder
from craftcli.cache.storage.packed_chunks import PackedFiles, packed_bytes, piece_shape
from craftcli.cache.storage.zarr_layout import create_array

Values = npt.NDArray[Any]


def write(root: Path, values: Values, chunk_rows: int) -> PackedFiles:
    spec = ArraySpec(shape=values.shape[1:], dtype=str(values.dtype))
    folder = LocalFolder(root)
    files = folder.chunks("a", len(values), chunk_rows, spec, packed=True)
    assert isinstance(files, PackedFiles)
    for chunk in range(files.chunk_count):
        rows = values[chunk * chunk_rows : (chunk + 1) * chunk_rows]
        folder.write(files.key(chunk), files.encode(rows))
    return files


def ragged(rows: int, slots: int, width: int, dtype: str, seed: int = 0) -> Values:
    """Rows whose first slots are filled, some none and some all of them."""
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 100, (rows, slots, width)).astype(dtype)
    values[np.arange(slots) >= rng.integers(0, slots + 1, (rows, 1))] = 0
    return values


@pytest.fixture
def files(tmp_path: Path) -> PackedFiles:
    return write(tmp_path, ragged(10, 16, 3, "float32"), chunk_rows=4)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    rows=st.integers(1, 9),
    chunk_rows=st.integers(1, 10),
    slots=st.integers(1, 40),
    width=st.integers(1, 3),
    dtype=st.sampled_from(["uint8", "uint16", "int32", "float16", "float64"]),
    seed=st.integers(0, 99),
)
def test_stock_zarr_and_craft_read_the_same_rows(
    rows: int, chunk_rows: int, slots: int, width: int, dtype: str, seed: int
) -> None:
    values = ragged(rows, slots, width, dtype, seed)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        group = zarr.create_group(root, zarr_format=3)
        files = write(root, values, chunk_rows)
        create_array(group, files)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Combining a `sharding_indexed` codec")
            array = zarr.open_group(root, mode="r")["a"]
        assert isinstance(array, zarr.Array)
        np.testing.assert_array_equal(array[:], values)
        got = [files.load(chunk) for chunk in range(files.chunk_count)]
        np.testing.assert_array_equal(np.concatenate(got), values)
        copied = np.full_like(values[:chunk_rows], 7)
        files.load_into(0, copied)
        np.testing.assert_array_equal(copied, values[:chunk_rows])


def test_empty_slots_take_no_space(tmp_path: Path) -> None:
    values = np.zeros((6, 256, 512), np.uint16)
    for row, filled in enumerate((0, 1, 8, 9, 40, 256)):
        values[row, :filled] = 1
    files = write(tmp_path, values, chunk_rows=4)
    pieces = [0, 1, 1, 2], [5, 32]
    for chunk, counts in enumerate(pieces):
        size = files.file(chunk).stat().st_size
        # Pieces of 8 slots, 32 entries of 16 bytes for each of 4 rows, two checksums.
        assert size == sum(counts) * 8 * 1024 + 4 * 32 * 16 + 8
    assert packed_bytes(values[4:]) == 37 * 8 * 1024 + 2 * 32 * 16


def test_a_negative_zero_and_a_nan_are_kept(tmp_path: Path) -> None:
    values = np.zeros((2, 16, 4), np.float32)
    values[0, 0, 0], values[1, 15, 3] = -0.0, np.nan
    loaded = write(tmp_path, values, chunk_rows=2).load(0)
    np.testing.assert_array_equal(loaded.view(np.uint32), values.view(np.uint32))


def test_pieces_divide_the_slots() -> None:
    for slots in range(1, 300):
        _, piece, width = piece_shape((slots, 5))
        assert slots % piece == 0
        assert piece <= 8
        assert width == 5


def test_loaded_rows_cannot_be_changed(files: PackedFiles) -> None:
    with pytest.raises(ValueError, match="read-only"):
        files.load(0)[:] = 0


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (Path.unlink, "the file is missing"),
        (empty, "cannot be read"),
        (truncate, "checksum does not match|bytes instead of"),
        (flip, "checksum does not match"),
        (lambda file: file.write_bytes(file.read_bytes() + bytes(4)), "checksum does not match"),
        (lambda file: file.write_bytes(bytes(10**4)), "bytes instead of"),
    ],
)
def test_damage_is_named(files: PackedFiles, harm: Callable[[Path], Any], problem: str) -> None:
    harm(files.file(1))
    with pytest.raises(DamagedChunkError, match=rf"a chunk 1 \(rows 4 to 7\): .*({problem})"):
        files.load(1)
    assert files.damage(0) is None


def test_a_sealed_chunk_must_have_that_checksum(files: PackedFiles) -> None:
    files.load(0, committed=files.checksum(0))
    with pytest.raises(DamagedChunkError, match="was replaced"):
        files.load(0, committed=files.checksum(1))
    assert files.checksum_of(files.load(0)) == files.checksum(0)


def sealed(payload: bytes) -> bytes:
    return payload + int(google_crc32c.value(payload)).to_bytes(4, "little")


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index[:, 0].__setitem__(0, 2**40),
        lambda index: index[:, 0].__setitem__(0, index[1, 0]),
        lambda index: index[:, 1].__setitem__(0, 1),
        lambda index: index.__setitem__(0, 2**64 - 1),
        lambda index: index.__setitem__(-1, index[0]),
    ],
)
def test_an_index_that_craft_would_not_write_is_refused(
    tmp_path: Path, change: Callable[[Values], None]
) -> None:
    """Its checksums are right: somebody wrote it on purpose."""
    values = np.ones((3, 16, 4), np.float32)
    files = write(tmp_path, values, chunk_rows=4)
    content = files.file(0).read_bytes()[:-4]
    end = len(content) - 4 - 4 * 2 * 16
    index = np.frombuffer(content[end:-4], "<u8").reshape(-1, 2).copy()
    change(index)
    files.file(0).write_bytes(sealed(content[:end] + sealed(index.tobytes())))
    with pytest.raises(DamagedChunkError, match="its index does not describe its pieces"):
        files.load(0)
