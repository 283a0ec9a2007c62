"""Chunk files on a local disk, read without zarr.

A chunk file is raw rows and their crc32c. It is checked once, then mapped into memory or copied to
it: a random batch is hundreds of times cheaper than through the zarr API. `zarr_layout` makes sure
that zarr stores arrays this way.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from craftcli.cache.storage.chunks import CRC_BYTES, Chunks
from craftcli.system.file_mapping import MappedFiles, map_file

PIECE_BYTES = 512 * 1024
"""Small enough to stay in the processor's cache between reading and checking."""


@dataclass(frozen=True, kw_only=True)
class ChunkFiles(Chunks):
    """The chunk files of one array: raw rows, little endian, then their crc32c."""

    root: Path
    """Folder of the cache."""

    def file(self, chunk: int) -> Path:
        """Path of a chunk."""
        return self.root / self.key(chunk)

    def load(
        self, chunk: int, *, check: bool = True, committed: bytes | None = None
    ) -> npt.NDArray[Any]:
        """Map the rows of one chunk, without the padding of the last one; see `Chunks.load`."""
        with self._checked(chunk, check=check, committed=committed) as file:
            payload = map_file(file.fileno(), self.payload_bytes)
        rows = payload.view(self.stored_dtype).reshape(self.chunk_shape)
        return rows[: self.rows - chunk * self.chunk_rows]

    def map_into(
        self, chunk: int, files: MappedFiles, offset: int, *, committed: bytes | None = None
    ) -> None:
        """Map one chunk, padding included and checked, beside others; otherwise as `load`."""
        with self._checked(chunk, check=True, committed=committed) as file:
            files.add(file.fileno(), offset, self.payload_bytes)

    def load_into(
        self, chunk: int, out: npt.NDArray[Any], *, committed: bytes | None = None
    ) -> None:
        """Copy the rows of one chunk to `out`, checked; see `Chunks.load_into`."""
        with self._opened(chunk) as file:
            crc = self._read(file, out.reshape(-1).view(np.uint8))
            self.check_ending(chunk, file.read(), crc, committed)

    def checksum(self, chunk: int) -> bytes:
        """The crc32c that the file ends with, not compared with its rows.

        Raises:
            DamagedChunkError: the file is missing, cannot be read or has another length.
        """
        with self._opened(chunk) as file:
            file.seek(-CRC_BYTES, os.SEEK_END)
            return file.read()

    @contextlib.contextmanager
    def _checked(self, chunk: int, *, check: bool, committed: bytes | None) -> Iterator[FileIO]:
        """Open a chunk file and check that it has the committed checksum."""
        with self._opened(chunk) as file:
            crc = self._read(file) if check else None
            file.seek(self.payload_bytes)
            self.check_ending(chunk, file.read(), crc, committed)
            yield file

    @contextlib.contextmanager
    def _opened(self, chunk: int) -> Iterator[FileIO]:
        """Open a chunk file of the right size; its errors become DamagedChunkErrors."""
        expected = self.payload_bytes + CRC_BYTES
        try:
            with self.file(chunk).open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected:
                    self.fail(chunk, f"the file has {size} bytes instead of {expected}")
                yield file
        except FileNotFoundError:
            self.fail(chunk, "the file is missing")
        except OSError as error:
            self.fail(chunk, f"the file cannot be read ({error.strerror or error})")

    def _read(self, file: FileIO, out: npt.NDArray[np.uint8] | None = None) -> int:
        """Read the payload and return its checksum; copy it to `out` as far as there is room."""
        # Twice as fast as through a new mapping or straight into new memory, also from disk.
        scratch = np.empty(min(PIECE_BYTES, self.payload_bytes), np.uint8)
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
