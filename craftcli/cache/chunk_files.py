"""Chunk files: rows on a local disk, read without zarr.

A chunk file is raw rows and their crc32c, so it is checked as a whole and mapped into memory or
copied to it, which makes a random batch hundreds of times cheaper than through the zarr API.
`store` makes sure that zarr keeps an array this way.
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

from craftcli.cache.chunks import CRC_BYTES, Chunks
from craftcli.cache.memory import Region

# Small enough to stay in the processor's cache between reading and checking.
_PIECE_BYTES = 512 * 1024


@dataclass(frozen=True, kw_only=True)
class ChunkFiles(Chunks):
    """The chunk files of one array: raw rows, little endian, then their crc32c."""

    root: Path
    """Folder of the cache."""

    def file(self, chunk: int) -> Path:
        """Path of a chunk."""
        return self.root / self.key(chunk)

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
            self.check_ending(chunk, file.read(), crc, sealed)
            region.place(file.fileno(), offset, self.payload_bytes)

    def load_into(self, chunk: int, out: npt.NDArray[Any], *, sealed: bytes | None = None) -> None:
        """Copy the rows of one chunk to `out`, checked; `out` has the dtype `stored_dtype`.

        Raises:
            DamagedChunkError: as for `load`; `out` may then hold some of the rows.
        """
        with self._opened(chunk) as file:
            crc = self._read(file, out.reshape(-1).view(np.uint8))
            self.check_ending(chunk, file.read(), crc, sealed)

    def checksum(self, chunk: int) -> bytes:
        """The crc32c that the file ends with, not compared with its rows.

        Raises:
            DamagedChunkError: the file is missing, cannot be read or has another length.
        """
        with self._opened(chunk) as file:
            file.seek(-CRC_BYTES, os.SEEK_END)
            return file.read()

    @contextlib.contextmanager
    def _opened(self, chunk: int) -> Iterator[FileIO]:
        """Open a chunk file of the right size; what goes wrong with it is damage."""
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
