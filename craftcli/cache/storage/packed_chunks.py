"""Packed chunks: rows without their pieces of zeros, as Zarr's codec `sharding_indexed` has them.

A policy may have 256 slots for action tokens and fill 50: the other vectors of a row are zeros. A
packed row is cut into pieces of a few slots, and a piece of zeros is not stored. A chunk file has

    the pieces that are stored, in the order of rows and slots, without gaps
    the offset and the length of every piece of the chunk, uint64 each; both 2^64 - 1 if not stored
    the crc32c of these numbers
    the crc32c of everything before it, as in every chunk file

Equal rows give equal bytes, and every chunk has a file, also one of zeros.
"""

import math
import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, override

import google_crc32c
import numpy as np
import numpy.typing as npt

from craftcli.cache.storage.chunks import CRC_BYTES, Chunks
from craftcli.cache.storage.whole_chunks import Objects
from craftcli.system.file_mapping import map_file

_MOST_SLOTS = 8
"""Smaller pieces leave out more zeros; larger ones are faster for zarr, which decodes each."""
_ENTRY = np.dtype(("<u8", 2))
_NOT_STORED = 2**64 - 1


def piece_shape(row: Sequence[int]) -> tuple[int, ...]:
    """Shape of a piece of rows of this shape: one row, and some of its slots, its first axis.

    >>> piece_shape((256, 2048)), piece_shape((255, 32)), piece_shape((64,))
    ((1, 8, 2048), (1, 5, 32), (1, 64))
    """
    if len(row) < 2:
        return (1, *row)
    slots, *rest = row
    most = min(slots, _MOST_SLOTS)
    return (1, max(n for n in range(1, most + 1) if slots % n == 0), *rest)


def packed_bytes(rows: npt.NDArray[Any]) -> int:
    """Bytes that these rows take in a packed chunk."""
    pieces, stored = _cut(rows)
    return int(stored.size) * int(pieces[0].nbytes) + len(pieces) * _ENTRY.itemsize


def empty_share(rows: npt.NDArray[Any]) -> float:
    """The share of pieces that packing these rows leaves out."""
    pieces, stored = _cut(rows)
    return 1 - stored.size / len(pieces)


class PackedRows:
    """The rows of one packed chunk, without the padding of the last one."""

    def __init__(
        self, pieces: npt.NDArray[Any], stored: npt.NDArray[np.intp], rows: int, per_row: int
    ) -> None:
        """`pieces` [P, ...] are stored; `stored` are their sorted numbers, `per_row` in a row."""
        self.pieces = pieces
        self._stored = stored
        self._rows = rows
        self._per_row = per_row
        self._places = stored % per_row
        self._starts = np.searchsorted(stored, np.arange(rows + 1) * per_row).tolist()

    def copied(self) -> "PackedRows":
        """The same rows, copied from the memory in which they are mapped."""
        return PackedRows(self.pieces.copy(), self._stored, self._rows, self._per_row)

    def copy_row(self, row: int, out: npt.NDArray[Any]) -> None:
        """Copy one row to `out`, which must be zeros."""
        where = slice(self._starts[row], self._starts[row + 1])
        out.reshape(-1, *self.pieces.shape[1:])[self._places[where]] = self.pieces[where]

    def copy_all(self, out: npt.NDArray[Any]) -> None:
        """Copy all rows to `out`, which must be zeros."""
        out.reshape(-1, *self.pieces.shape[1:])[self._stored] = self.pieces


@dataclass(frozen=True, kw_only=True)
class PackedChunks(Chunks):
    """The packed chunks of one array."""

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of a piece, for zarr."""
        return piece_shape(self.spec.shape)

    def encode(self, rows: npt.NDArray[Any]) -> bytes:
        """The content of the chunk file of these rows."""
        pieces, stored = _cut(np.asarray(rows, self.stored_dtype))
        index = np.full(self._piece_count, _NOT_STORED, _ENTRY)
        index[stored] = np.stack(
            [np.arange(stored.size) * self._piece_bytes, np.full(stored.size, self._piece_bytes)],
            axis=1,
        )
        return _with_checksum(pieces[stored].tobytes() + _with_checksum(index.tobytes()))

    def open(self, chunk: int, *, check: bool = True, committed: bytes | None = None) -> PackedRows:
        """The rows of one chunk; see `Chunks.load`."""
        content = self._sized_content(chunk)
        payload, ending = content[:-CRC_BYTES], content[-CRC_BYTES:].tobytes()
        crc = google_crc32c.extend(0, payload) if check else None
        self.check_ending(chunk, ending, crc, committed)
        return self._decode(chunk, payload)

    @override
    def load(
        self, chunk: int, *, check: bool = True, committed: bytes | None = None
    ) -> npt.NDArray[Any]:
        rows = np.zeros((self._rows_of(chunk), *self.spec.shape), self.stored_dtype)
        self.open(chunk, check=check, committed=committed).copy_all(rows)
        rows.flags.writeable = False
        return rows

    @override
    def load_into(
        self, chunk: int, out: npt.NDArray[Any], *, committed: bytes | None = None
    ) -> None:
        out[:] = 0
        self.open(chunk, committed=committed).copy_all(out)

    @override
    def checksum_of(self, rows: npt.NDArray[Any]) -> bytes:
        return self.encode(rows)[-CRC_BYTES:]

    @abstractmethod
    def _content(self, chunk: int) -> npt.NDArray[np.uint8]:
        """The bytes of a chunk file, which fails if it is missing."""

    @property
    def _piece_bytes(self) -> int:
        return math.prod(self.piece) * self.stored_dtype.itemsize

    @property
    def _piece_count(self) -> int:
        return self.payload_bytes // self._piece_bytes

    @property
    def _index_bytes(self) -> int:
        return self._piece_count * _ENTRY.itemsize + CRC_BYTES

    def _rows_of(self, chunk: int) -> int:
        return min(self.chunk_rows, self.rows - chunk * self.chunk_rows)

    def _sized_content(self, chunk: int) -> npt.NDArray[np.uint8]:
        content = self._content(chunk)
        least = self._index_bytes + CRC_BYTES
        most = least + self.payload_bytes
        if not least <= content.size <= most:
            self.fail(chunk, f"it has {content.size} bytes instead of {least} to {most}")
        return content

    def _decode(self, chunk: int, payload: npt.NDArray[np.uint8]) -> PackedRows:
        """Find the pieces; an index that `encode` would not have written is damage."""
        end = payload.size - self._index_bytes
        index = payload[end:-CRC_BYTES].view("<u8").reshape(-1, 2)
        stored = np.flatnonzero(index[:, 1] == self._piece_bytes)
        rows, per_row = self._rows_of(chunk), self._piece_count // self.chunk_rows
        in_order = np.array_equal(index[stored, 0], np.arange(stored.size) * self._piece_bytes)
        others = np.delete(index, stored, axis=0)
        if (
            not in_order
            or (others != _NOT_STORED).any()
            or end != stored.size * self._piece_bytes
            or (stored.size and stored[-1] >= rows * per_row)
        ):
            self.fail(chunk, "its index does not describe its pieces")
        pieces = payload[:end].view(self.stored_dtype).reshape(-1, *self.piece[1:])
        return PackedRows(pieces, stored, rows, per_row)


@dataclass(frozen=True, kw_only=True)
class PackedFiles(PackedChunks):
    """Packed chunks in files, which are mapped."""

    root: Path
    """Folder of the cache."""

    def file(self, chunk: int) -> Path:
        """Path of a chunk."""
        return self.root / self.key(chunk)

    @override
    def checksum(self, chunk: int) -> bytes:
        return self._sized_content(chunk)[-CRC_BYTES:].tobytes()

    @override
    def _content(self, chunk: int) -> npt.NDArray[np.uint8]:
        try:
            with self.file(chunk).open("rb", buffering=0) as file:
                return map_file(file.fileno(), os.fstat(file.fileno()).st_size)
        except FileNotFoundError:
            self.fail(chunk, "the file is missing")
        except OSError as error:
            self.fail(chunk, f"the file cannot be read ({error.strerror or error})")


@dataclass(frozen=True, kw_only=True)
class PackedObjects(PackedChunks):
    """Packed chunks in an object store, which are fetched whole."""

    objects: Objects

    @override
    def checksum(self, chunk: int) -> bytes:
        ending = self.objects.read_ending(self.key(chunk), CRC_BYTES)
        if ending is None or len(ending) != CRC_BYTES:
            self.fail(chunk, "the object is missing or empty")
        return ending

    @override
    def _content(self, chunk: int) -> npt.NDArray[np.uint8]:
        data = self.objects.read(self.key(chunk))
        if data is None:
            self.fail(chunk, "the object is missing")
        return np.frombuffer(data, np.uint8)


def _cut(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
    """The pieces of rows, [P, numbers of a piece], and which of them are stored."""
    numbers = math.prod(piece_shape(rows.shape[1:]))
    pieces = np.ascontiguousarray(rows).reshape(-1, numbers)
    # By their bits: -0.0 equals 0.0, and has to be stored.
    return pieces, np.flatnonzero(pieces.view(f"u{pieces.itemsize}").any(axis=1))


def _with_checksum(data: bytes) -> bytes:
    return data + int(google_crc32c.value(data)).to_bytes(CRC_BYTES, "little")
