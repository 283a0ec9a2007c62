"""Chunk files: what the rows of an array look like on disk, and reading them without zarr.

A chunk file is raw rows and their crc32c, so it is mapped into memory and checked as a whole, which
makes a random batch hundreds of times cheaper than through the zarr API. `store` makes sure that
zarr keeps an array this way.
"""

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

import google_crc32c
import numpy as np
import numpy.typing as npt

_CRC_BYTES = 4


class DamagedChunkError(Exception):
    """A chunk file that is missing or not what was written; names array, chunk and rows."""


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """What one row of an array looks like."""

    shape: tuple[int, ...]
    """Shape of a row: the array's without the row axis."""
    dtype: str
    """Numpy dtype on disk."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Zarr attributes of the array; `craft_dtype` tells bfloat16 from uint16."""

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "biuf" or any(size < 1 for size in self.shape):
            raise ValueError(f"rows of {dtype} {self.shape} are not numbers on non-empty axes")
        # One spelling, so that specs compare equal whether they were given as "<f4" or "float32".
        object.__setattr__(self, "dtype", dtype.name)

    @property
    def row_bytes(self) -> int:
        """Bytes a row takes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def craft_dtype(self) -> str:
        """The dtype the stored numbers stand for."""
        return str(self.attributes.get("craft_dtype", self.dtype))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"shape": list(self.shape), "dtype": self.dtype, "attributes": self.attributes}


@dataclass(frozen=True, kw_only=True)
class ChunkFiles:
    """The chunk files of one array: raw rows, little endian, then their crc32c."""

    root: Path
    """Folder of the cache."""
    name: str
    """Name of the array, which is also its folder's."""
    rows: int
    """Rows over all chunks."""
    chunk_rows: int
    """Rows in a chunk file; in the last, zeros fill it up."""
    spec: ArraySpec
    """What a row looks like."""

    @property
    def folder(self) -> Path:
        """Folder of the array."""
        return self.root / self.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return (self.rows, *self.spec.shape)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a chunk, padding included."""
        return (self.chunk_rows, *self.spec.shape)

    def file(self, chunk: int) -> Path:
        """Path of a chunk by zarr's default key: c, then the position along each axis."""
        return self.folder.joinpath("c", str(chunk), *("0" for _ in self.spec.shape))

    def load(self, chunk: int, *, check: bool = True) -> npt.NDArray[Any]:
        """Map the rows of one chunk, without the padding of the last one.

        Raises:
            DamagedChunkError: the file is missing, cannot be read or has another checksum.
        """
        data = self._map(chunk)
        payload = data[:-_CRC_BYTES]
        if check and _crc32c(payload) != bytes(data[-_CRC_BYTES:]):
            self._fail(chunk, "the checksum does not match")
        filled = min(self.chunk_rows, self.rows - chunk * self.chunk_rows)
        dtype = np.dtype(self.spec.dtype).newbyteorder("<")
        return payload.view(dtype).reshape(self.chunk_shape)[:filled]

    def damage(self, chunk: int) -> str | None:
        """What is wrong with a chunk, if anything."""
        try:
            self.load(chunk)
        except DamagedChunkError as error:
            return str(error)
        return None

    def checksum(self, chunk: int) -> bytes:
        """The crc32c that the file ends with, unchecked."""
        with self.file(chunk).open("rb") as opened:
            opened.seek(-_CRC_BYTES, os.SEEK_END)
            return opened.read()

    def _map(self, chunk: int) -> npt.NDArray[np.uint8]:
        expected = self.chunk_rows * self.spec.row_bytes + _CRC_BYTES
        try:
            with self.file(chunk).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected:
                    self._fail(chunk, f"the file has {size} bytes instead of {expected}")
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            self._fail(chunk, "the file is missing")
        except OSError as error:
            self._fail(chunk, f"the file cannot be read ({error.strerror or error})")
        return np.frombuffer(mapped, np.uint8)

    def _fail(self, chunk: int, problem: str) -> Never:
        first = chunk * self.chunk_rows
        last = min(first + self.chunk_rows, self.rows) - 1
        raise DamagedChunkError(f"{self.name} chunk {chunk} (rows {first} to {last}): {problem}")


def commit_record(arrays: Iterable[ChunkFiles], chunk: int) -> int:
    """The number that seals one chunk of all arrays; `arrays` come in the order of their names."""
    checksums = b"".join(files.checksum(chunk) for files in arrays)
    # Zero is what a record that was never written reads as.
    return int(google_crc32c.value(checksums)) or 1


def _crc32c(payload: npt.NDArray[np.uint8]) -> bytes:
    return int(google_crc32c.value(payload)).to_bytes(_CRC_BYTES, "little")
