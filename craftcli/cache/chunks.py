"""Chunks: the rows of an array that are written, checked and read as a whole.

`chunk_files` keeps them in files that are mapped, `whole_chunks` gets them through a store. What
they have in common is the shape, and the checksum by which the commit records know them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Never

import google_crc32c
import numpy as np
import numpy.typing as npt

CRC_BYTES = 4


class DamagedChunkError(Exception):
    """A chunk that is missing or not what was written; names array, chunk and rows."""


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
class Chunks(ABC):
    """The chunks of one array."""

    name: str
    """Name of the array."""
    rows: int
    """Rows over all chunks."""
    chunk_rows: int
    """Rows in a chunk; in the last, zeros fill it up."""
    spec: ArraySpec
    """What a row looks like."""

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
        """Number of chunks."""
        return -(-self.rows // self.chunk_rows)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a chunk, padding included, before its checksum."""
        return self.chunk_rows * self.spec.row_bytes

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype in the byte order that is stored and summed."""
        return np.dtype(self.spec.dtype).newbyteorder("<")

    def key(self, chunk: int) -> str:
        """Where a chunk is below the cache, by zarr's default: c, then a number for each axis."""
        return "/".join((self.name, "c", str(chunk), *("0" for _ in self.spec.shape)))

    @abstractmethod
    def load(
        self, chunk: int, *, check: bool = True, sealed: bytes | None = None
    ) -> npt.NDArray[Any]:
        """The rows of one chunk, without the padding of the last one; not to be written to.

        `sealed` is the checksum that it must have; `check` compares the rows with it.

        Raises:
            DamagedChunkError: it is missing, cannot be read or has another checksum.
        """

    @abstractmethod
    def load_into(self, chunk: int, out: npt.NDArray[Any], *, sealed: bytes | None = None) -> None:
        """Copy the rows of one chunk to `out`, checked; `out` has the dtype `stored_dtype`.

        Raises:
            DamagedChunkError: as for `load`; `out` may then hold some of the rows.
        """

    @abstractmethod
    def checksum(self, chunk: int) -> bytes:
        """The crc32c of the chunk's rows, padding included, as it was written down.

        Raises:
            DamagedChunkError: it is missing or cannot be read.
        """

    def damage(self, chunk: int) -> str | None:
        """What is wrong with a chunk, if anything."""
        try:
            self.load(chunk)
        except DamagedChunkError as error:
            return str(error)
        return None

    def fail(self, chunk: int, problem: str) -> Never:
        """Raise a DamagedChunkError."""
        first = chunk * self.chunk_rows
        last = min(first + self.chunk_rows, self.rows) - 1
        raise DamagedChunkError(f"{self.name} chunk {chunk} (rows {first} to {last}): {problem}")

    def check_ending(
        self, chunk: int, ending: bytes, crc: int | None, sealed: bytes | None
    ) -> None:
        """Hold the checksum that a chunk ends with against its rows' and against the seal."""
        if crc is not None and crc.to_bytes(CRC_BYTES, "little") != ending:
            self.fail(chunk, "the checksum does not match")
        if sealed is not None and sealed != ending:
            self.fail(chunk, "it was replaced while the cache was open")


def seal_of(checksums: Iterable[bytes]) -> int:
    """The commit record over the checksums of one chunk of all arrays."""
    # Zero is what a record that was never written reads as.
    return int(google_crc32c.value(b"".join(checksums))) or 1
