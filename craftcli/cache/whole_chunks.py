"""Chunks that come whole through a store: from another machine, or encoded in some other way.

The rule for a cache that somebody encoded anew, with compression for instance: the checksum of a
chunk is that of its decoded rows, so that its commit record still vouches for them. To check one
array of such a chunk, the others have to be decoded too, once.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt

from craftcli.cache.chunks import CRC_BYTES, Chunks

# Decoded chunks that an array keeps between being checked and being used.
_RECENT = 2


class Objects(Protocol):
    """Where whole chunks come from."""

    def read(self, key: str) -> bytes | None:
        """An object; None if there is none."""
        ...

    def read_ending(self, key: str, size: int) -> bytes | None:
        """The last bytes of an object; None if there is none."""
        ...


@dataclass(frozen=True, kw_only=True)
class ObjectChunks(Chunks):
    """The chunks of one array in a remote store, as chunk files have them: rows, then crc32c."""

    objects: Objects

    def load(
        self, chunk: int, *, check: bool = True, sealed: bytes | None = None
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
        self.check_ending(chunk, data[self.payload_bytes :], crc, sealed)
        rows = payload.view(self.stored_dtype).reshape(self.chunk_shape)
        return rows[: self.rows - chunk * self.chunk_rows]

    def load_into(self, chunk: int, out: npt.NDArray[Any], *, sealed: bytes | None = None) -> None:
        """Copy the rows of one chunk to `out`, checked."""
        out[:] = self.load(chunk, sealed=sealed)

    def checksum(self, chunk: int) -> bytes:
        """The crc32c that the object ends with, not compared with its rows."""
        ending = self.objects.read_ending(self.key(chunk), CRC_BYTES)
        if ending is None or len(ending) != CRC_BYTES:
            self.fail(chunk, "the object is missing or empty")
        return ending


@dataclass(frozen=True, kw_only=True)
class DecodedChunks(Chunks):
    """The chunks of one array that zarr decodes, whatever they were encoded by."""

    decode: Callable[[int], npt.NDArray[Any]]
    """The rows of a chunk; what it raises is damage, unless it is an error of craft's own."""
    _recent: dict[int, tuple[npt.NDArray[Any], bytes]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def load(
        self, chunk: int, *, check: bool = True, sealed: bytes | None = None
    ) -> npt.NDArray[Any]:
        """The rows of one chunk, decoded; they always are what their checksum was made of."""
        rows, crc = self._decoded(chunk)
        self.check_ending(chunk, crc, None, sealed)
        return rows

    def load_into(self, chunk: int, out: npt.NDArray[Any], *, sealed: bytes | None = None) -> None:
        """Copy the rows of one chunk to `out`."""
        out[:] = self.load(chunk, sealed=sealed)

    def checksum(self, chunk: int) -> bytes:
        """The crc32c that the rows would be stored with if nothing encoded them."""
        return self._decoded(chunk)[1]

    def _decoded(self, chunk: int) -> tuple[npt.NDArray[Any], bytes]:
        with self._lock:
            # Taken out and put back, so that the one that was used last goes last.
            found = self._recent.pop(chunk, None) or self._fetch(chunk)
            self._recent[chunk] = found
            if len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]
            return found

    def _fetch(self, chunk: int) -> tuple[npt.NDArray[Any], bytes]:
        rows = np.ascontiguousarray(self.decode(chunk), self.stored_dtype)
        crc = google_crc32c.extend(0, rows.reshape(-1).view(np.uint8))
        padding = self.payload_bytes - rows.nbytes
        crc = google_crc32c.extend(crc, bytes(padding)) if padding else crc
        return rows, crc.to_bytes(CRC_BYTES, "little")
