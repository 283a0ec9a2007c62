"""The rows of one array, in memory or mapped, each chunk loaded and checked when first touched.

A batch of rows is small, so that what Python does for each of them decides the speed: both ways do
next to nothing once the chunks are there.
"""

import contextlib
import mmap
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from craftcli.cache.chunks import ChunkFiles
from craftcli.cache.memory import Region

Seal = Callable[[int], bytes | None]
"""The checksum that a chunk must have, by its number; None when any is fine."""


class Rows(Protocol):
    """Random access to one array; `rows` are in range."""

    def read(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """Copy rows in the order given."""
        ...

    def read_all(self) -> npt.NDArray[Any]:
        """Copy every row."""
        ...


def rows_in_memory(files: ChunkFiles, seal: Seal) -> Rows:
    """Rows that are copied to memory."""
    # Memory is only taken as chunks come in.
    values = np.empty(files.shape, files.stored_dtype)

    def load(chunk: int) -> None:
        start = chunk * files.chunk_rows
        place = values[start : start + files.chunk_rows]
        files.load_into(chunk, place, sealed=seal(chunk))

    return _ContiguousRows(files, values, load)


def rows_in_files(files: ChunkFiles, seal: Seal, *, limit: int) -> Rows:
    """Rows that stay in their files, of which at most `limit` are mapped at a time."""
    if files.payload_bytes % mmap.PAGESIZE or files.chunk_count > limit:
        return _ScatteredRows(files, seal, limit)
    region = Region(files.chunk_count * files.payload_bytes)
    values = region.values.view(files.stored_dtype).reshape(-1, *files.spec.shape)

    def load(chunk: int) -> None:
        files.map_into(chunk, region, chunk * files.payload_bytes, sealed=seal(chunk))

    return _ContiguousRows(files, values[: files.rows], load)


class _ContiguousRows:
    """Rows at addresses one after the other, so that numpy takes any of them at once."""

    def __init__(
        self, files: ChunkFiles, values: npt.NDArray[Any], load: Callable[[int], None]
    ) -> None:
        self._chunk_rows = files.chunk_rows
        self._dtype = np.dtype(files.spec.dtype)
        self._values = values
        self._load = load
        self._missing = set(range(files.chunk_count))

    def read(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """Copy rows in the order given."""
        if self._missing:
            self._load_all(set((rows // self._chunk_rows).tolist()))
        return self._values.take(rows, axis=0).astype(self._dtype, copy=False)

    def read_all(self) -> npt.NDArray[Any]:
        """Copy every row."""
        self._load_all(self._missing)
        return self._values.astype(self._dtype)

    def _load_all(self, chunks: set[int]) -> None:
        # Two threads may load one chunk at once: both bring the same, and neither reads before.
        for chunk in sorted(self._missing & chunks):
            self._load(chunk)
            self._missing.discard(chunk)


class _ScatteredRows:
    """Rows in chunks that are mapped wherever there is room."""

    def __init__(self, files: ChunkFiles, seal: Seal, limit: int) -> None:
        self._files = files
        self._chunks = _MappedChunks(files, seal, limit)

    def read(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """Copy rows in the order given."""
        size, chunks = self._files.chunk_rows, self._chunks
        # Joining single rows beats sorting them by chunk, and flat ones are joined fastest.
        parts = [chunks[row // size][row % size] for row in rows.tolist()]
        joined: npt.NDArray[Any] = np.concatenate(parts)
        return joined.reshape(-1, *self._files.spec.shape)

    def read_all(self) -> npt.NDArray[Any]:
        """Copy every row."""
        out = np.empty(self._files.shape, self._files.stored_dtype)
        flat, size = out.reshape(len(out), -1), self._files.chunk_rows
        for chunk in range(self._files.chunk_count):
            flat[chunk * size : (chunk + 1) * size] = self._chunks[chunk]
        return out.astype(self._files.spec.dtype, copy=False)


class _MappedChunks(dict[int, npt.NDArray[Any]]):
    """Mapped chunks by number, a row flat; one that is not there is mapped when asked for."""

    def __init__(self, files: ChunkFiles, seal: Seal, limit: int) -> None:
        super().__init__()
        self._files = files
        self._seal = seal
        self._limit = limit
        self._checked: set[int] = set()

    def __missing__(self, chunk: int) -> npt.NDArray[Any]:
        check = chunk not in self._checked
        rows = self._files.load(chunk, check=check, sealed=self._seal(chunk))
        self._checked.add(chunk)
        if len(self) >= self._limit:
            # For rows in random order any chunk will do; whoever reads it still holds the mapping.
            with contextlib.suppress(KeyError):
                self.popitem()
        self[chunk] = flat = rows.reshape(len(rows), -1)
        return flat
