"""Chunks: consecutive rows of an array that are written, checked and read together.

`chunk_files` maps them from files, `whole_chunks` fetches or decodes them, `packed_chunks` leaves
out their zeros. Common to all are the shape, the checksum of each chunk, and the commit record over
the checksums of all arrays.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Never

import google_crc32c
import numpy as np
import numpy.typing as npt

CRC_BYTES = 4

type RowArrays = dict[str, npt.NDArray[Any]]
"""The same rows of several arrays, by the name of the array."""


class DamagedChunkError(Exception):
    """A chunk is missing or was changed; the message names array, chunk and rows."""


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Shape, dtype and attributes of the rows of an array."""

    shape: tuple[int, ...]
    """Shape of a row: the shape of the array without its first axis."""
    dtype: str
    """Numpy dtype on disk."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Zarr attributes of the array; `craft_dtype` distinguishes bfloat16 from uint16."""

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "biuf" or any(size < 1 for size in self.shape):
            raise ValueError(f"rows of {dtype} {self.shape} are not numbers on non-empty axes")
        # One spelling, so that specs compare equal whether they were given as "<f4" or "float32".
        object.__setattr__(self, "dtype", dtype.name)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def craft_dtype(self) -> str:
        """The dtype that the stored numbers stand for."""
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
    """Rows in a chunk; the last one is padded with zeros."""
    spec: ArraySpec
    """Shape and dtype of a row."""

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
        """The dtype in the byte order of the file, over which checksums are taken."""
        return np.dtype(self.spec.dtype).newbyteorder("<")

    def key(self, chunk: int) -> str:
        """Name of the chunk below the cache, zarr's default: c, then a number for each axis."""
        return "/".join((self.name, "c", str(chunk), *("0" for _ in self.spec.shape)))

    @abstractmethod
    def load(
        self, chunk: int, *, check: bool = True, committed: bytes | None = None
    ) -> npt.NDArray[Any]:
        """Read-only rows of one chunk, without the padding of the last one.

        `committed` is the checksum that the commit record vouches for. `check` computes the
        checksum of the rows and compares it with the stored one.

        Raises:
            DamagedChunkError: it is missing, cannot be read or has another checksum.
        """

    @abstractmethod
    def load_into(
        self, chunk: int, out: npt.NDArray[Any], *, committed: bytes | None = None
    ) -> None:
        """Copy the rows of one chunk to `out`, checked; `out` has the dtype `stored_dtype`.

        Raises:
            DamagedChunkError: as for `load`; `out` may then hold some of the rows.
        """

    @abstractmethod
    def checksum(self, chunk: int) -> bytes:
        """The stored crc32c of the chunk's rows, padding included.

        Raises:
            DamagedChunkError: it is missing or cannot be read.
        """

    def checksum_of(self, rows: npt.NDArray[Any]) -> bytes:
        """The checksum that a chunk of these rows has, however zarr has encoded it since."""
        stored = np.ascontiguousarray(rows, self.stored_dtype)
        crc = google_crc32c.extend(0, stored.reshape(-1).view(np.uint8))
        padding = self.payload_bytes - stored.nbytes
        crc = google_crc32c.extend(crc, bytes(padding)) if padding else crc
        return int(crc).to_bytes(CRC_BYTES, "little")

    def damage(self, chunk: int) -> str | None:
        """Describe what is wrong with a chunk; None if nothing is."""
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
        self, chunk: int, ending: bytes, crc: int | None, committed: bytes | None
    ) -> None:
        """Compare the checksum `ending` with the rows' `crc` and with the committed one."""
        if crc is not None and crc.to_bytes(CRC_BYTES, "little") != ending:
            self.fail(chunk, "the checksum does not match")
        if committed is not None and committed != ending:
            self.fail(chunk, "it was replaced while the cache was open")


def commit_record(checksums: Iterable[bytes]) -> int:
    """The commit record of a chunk: the crc32c of the checksums of all arrays, never 0."""
    # A record that was never written reads as 0.
    return int(google_crc32c.value(b"".join(checksums))) or 1
