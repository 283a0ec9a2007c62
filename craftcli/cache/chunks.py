"""Chunk files: what the rows of an array look like on disk, and reading them without zarr.

A chunk file is raw rows and their crc32c, so it is checked as a whole and mapped into memory or
copied to it, which makes a random batch hundreds of times cheaper than through the zarr API.
`store` makes sure that zarr keeps an array this way.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Never

import google_crc32c
import numpy as np
import numpy.typing as npt

from craftcli.cache.memory import Region

_CRC_BYTES = 4
# Small enough to stay in the processor's cache between reading and checking.
_PIECE_BYTES = 512 * 1024


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

    @property
    def chunk_count(self) -> int:
        """Number of chunk files."""
        return -(-self.rows // self.chunk_rows)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a chunk file before its checksum."""
        return self.chunk_rows * self.spec.row_bytes

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype in its byte order on disk."""
        return np.dtype(self.spec.dtype).newbyteorder("<")

    def file(self, chunk: int) -> Path:
        """Path of a chunk by zarr's default key: c, then the position along each axis."""
        return self.folder.joinpath("c", str(chunk), *("0" for _ in self.spec.shape))

    def load(
        self, chunk: int, *, check: bool = True, sealed: bytes | None = None
    ) -> npt.NDArray[Any]:
        """Map the rows of one chunk, without the padding of the last one.

        `sealed` is the checksum that the file must end with; `check` compares the rows with it.

        Raises:
            DamagedChunkError: the file is missing, cannot be read or has another checksum.
        """
        region = Region(self.payload_bytes)
        self.map_into(chunk, region, 0, check=check, sealed=sealed)
        rows = region.values.view(self.stored_dtype).reshape(self.chunk_shape)
        return rows[: self.rows - chunk * self.chunk_rows]

    def map_into(
        self,
        chunk: int,
        region: Region,
        offset: int,
        *,
        check: bool = True,
        sealed: bytes | None = None,
    ) -> None:
        """Map one chunk, padding included, to some place of a region; otherwise as `load`."""
        with self._opened(chunk) as file:
            crc = self._read(file) if check else None
            file.seek(self.payload_bytes)
            self._check_ending(chunk, file.read(), crc, sealed)
            region.place(file.fileno(), offset, self.payload_bytes)

    def load_into(self, chunk: int, out: npt.NDArray[Any], *, sealed: bytes | None = None) -> None:
        """Copy the rows of one chunk to `out`, checked; `out` has the dtype `stored_dtype`.

        Raises:
            DamagedChunkError: as for `load`; `out` may then hold some of the rows.
        """
        with self._opened(chunk) as file:
            crc = self._read(file, out.reshape(-1).view(np.uint8))
            self._check_ending(chunk, file.read(), crc, sealed)

    def damage(self, chunk: int) -> str | None:
        """What is wrong with a chunk, if anything."""
        try:
            self.load(chunk)
        except DamagedChunkError as error:
            return str(error)
        return None

    def checksum(self, chunk: int) -> bytes:
        """The crc32c that the file ends with, not compared with its rows.

        Raises:
            DamagedChunkError: the file is missing, cannot be read or has another length.
        """
        with self._opened(chunk) as file:
            file.seek(-_CRC_BYTES, os.SEEK_END)
            return file.read()

    @contextlib.contextmanager
    def _opened(self, chunk: int) -> Iterator[FileIO]:
        """Open a chunk file of the right size; what goes wrong with it is damage."""
        expected = self.payload_bytes + _CRC_BYTES
        try:
            with self.file(chunk).open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected:
                    self._fail(chunk, f"the file has {size} bytes instead of {expected}")
                yield file
        except FileNotFoundError:
            self._fail(chunk, "the file is missing")
        except OSError as error:
            self._fail(chunk, f"the file cannot be read ({error.strerror or error})")

    def _read(self, file: FileIO, out: npt.NDArray[np.uint8] | None = None) -> int:
        """Read the payload, to `out` as far as there is room; its checksum."""
        # Twice as fast as through a new mapping or straight into new memory, also from disk.
        scratch = np.empty(min(_PIECE_BYTES, self.payload_bytes), np.uint8)
        crc = 0
        for start in range(0, self.payload_bytes, scratch.size):
            piece = scratch[: self.payload_bytes - start]
            if file.readinto(piece) != piece.size:
                raise OSError("it ended early")
            crc = google_crc32c.extend(crc, piece)
            if out is not None:
                place = out[start : start + piece.size]
                place[:] = piece[: place.size]
        return crc

    def _check_ending(
        self, chunk: int, ending: bytes, crc: int | None, sealed: bytes | None
    ) -> None:
        if crc is not None and crc.to_bytes(_CRC_BYTES, "little") != ending:
            self._fail(chunk, "the checksum does not match")
        if sealed is not None and sealed != ending:
            self._fail(chunk, "the file was replaced while the cache was open")

    def _fail(self, chunk: int, problem: str) -> Never:
        first = chunk * self.chunk_rows
        last = min(first + self.chunk_rows, self.rows) - 1
        raise DamagedChunkError(f"{self.name} chunk {chunk} (rows {first} to {last}): {problem}")


def commit_record(arrays: Iterable[ChunkFiles], chunk: int) -> int:
    """The number that seals one chunk of all arrays; `arrays` come in the order of their names."""
    return seal_of(files.checksum(chunk) for files in arrays)


def seal_of(checksums: Iterable[bytes]) -> int:
    """The commit record over the checksums of one chunk of all arrays."""
    # Zero is what a record that was never written reads as.
    return int(google_crc32c.value(b"".join(checksums))) or 1
