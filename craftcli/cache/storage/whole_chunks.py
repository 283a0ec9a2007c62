"""Chunks that are read whole: fetched from an object store, or decoded by zarr.

Decoded chunks are those of a cache that somebody encoded anew, for instance with compression. Their
checksum is computed from the decoded rows, so that the commit record still vouches for them. To
check one array of a chunk, all arrays have to be decoded once.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt

from craftcli.cache.storage.chunks import CRC_BYTES, Chunks

# Decoded chunks that an array keeps, because a chunk is decoded to be checked and again to be used.
_RECENT = 2


class Objects(Protocol):
    """The objects of a store, by key."""

    def read(self, key: str) -> bytes | None:
        """Read an object; None if there is none."""
        ...

    def read_ending(self, key: str, size: int) -> bytes | None:
        """Read the last bytes of an object; None if there is none."""
        ...


@dataclass(frozen=True, kw_only=True)
class ObjectChunks(Chunks):
    """The chunks of one array in an object store: raw rows, then their crc32c."""

    objects: Objects

    def load(
        self, chunk: int, *, check: bool = True, committed: bytes | None = None
    ) -> npt.NDArray[Any]:
        """The rows of one chunk, without the padding of the last one."""
        data = self.objects.read(self.key(chunk))
        if data is None:
            self.fail(chunk, "the object is missing")
        expected = self.payload_bytes + CRC_BYTES
        if len(data) != expected:
            self.fail(chunk, f"the object has {len(data)} bytes instead of {expected}")
        payload = np.frombuffer(data, np.uint8)[: self.payload_bytes]
        crc = google_crc32c.extend(0, payload) if check else None
        self.check_ending(chunk, data[self.payload_bytes :], crc, committed)
        rows = payload.view(self.stored_dtype).reshape(self.chunk_shape)
        return rows[: self.rows - chunk * self.chunk_rows]

    def load_into(
        self, chunk: int, out: npt.NDArray[Any], *, committed: bytes | None = None
    ) -> None:
        """Copy the rows of one chunk to `out`, checked."""
        out[:] = self.load(chunk, committed=committed)

    def checksum(self, chunk: int) -> bytes:
        """The crc32c that the object ends with, not compared with its rows."""
        ending = self.objects.read_ending(self.key(chunk), CRC_BYTES)
        if ending is None or len(ending) != CRC_BYTES:
            self.fail(chunk, "the object is missing or empty")
        return ending


@dataclass(frozen=True, kw_only=True)
class DecodedChunks(Chunks):
    """The chunks of one array that zarr decodes, with any codecs."""

    written: Chunks
    """The chunks as craft wrote them, whose checksums the commit records cover."""
    decode: Callable[[int], npt.NDArray[Any]]
    """Decode the rows of a chunk; raises a DamagedChunkError if that fails."""
    _recent: dict[int, tuple[npt.NDArray[Any], bytes]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def load(
        self, chunk: int, *, check: bool = True, committed: bytes | None = None
    ) -> npt.NDArray[Any]:
        """The decoded rows of one chunk; their checksum was computed from them."""
        rows, crc = self._decoded(chunk)
        self.check_ending(chunk, crc, None, committed)
        return rows

    def load_into(
        self, chunk: int, out: npt.NDArray[Any], *, committed: bytes | None = None
    ) -> None:
        """Copy the rows of one chunk to `out`."""
        out[:] = self.load(chunk, committed=committed)

    def checksum(self, chunk: int) -> bytes:
        """The crc32c that the rows had when craft wrote them."""
        return self._decoded(chunk)[1]

    def _decoded(self, chunk: int) -> tuple[npt.NDArray[Any], bytes]:
        with self._lock:
            # Taken out and put back at the end, so that the least recently used comes first.
            found = self._recent.pop(chunk, None) or self._fetch(chunk)
            self._recent[chunk] = found
            if len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]
            return found

    def _fetch(self, chunk: int) -> tuple[npt.NDArray[Any], bytes]:
        rows = np.ascontiguousarray(self.decode(chunk), self.stored_dtype)
        return rows, self.written.checksum_of(rows)
