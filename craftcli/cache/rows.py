"""The rows of one array, in memory, mapped or fetched, each chunk checked when first touched.

A batch of rows is small, so that what Python does for each of them decides the speed: they do
next to nothing once the chunks are there.
"""

import contextlib
import mmap
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from craftcli.cache.chunk_files import ChunkFiles
from craftcli.cache.chunks import Chunks
from craftcli.cache.fetching import is_fetched, lock_for
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

    def touch(self, rows: npt.NDArray[np.intp]) -> None:
        """Have rows at hand that will be read."""
        ...


def rows_in_memory(chunks: Chunks, seal: Seal) -> Rows:
    """Rows that are copied to memory."""
    # Memory is only taken as chunks come in.
    values = np.empty(chunks.shape, chunks.stored_dtype)

    def load(chunk: int) -> None:
        start = chunk * chunks.chunk_rows
        place = values[start : start + chunks.chunk_rows]
        chunks.load_into(chunk, place, sealed=seal(chunk))

    return _ContiguousRows(chunks, values, load)


def rows_fetched(chunks: Chunks, seal: Seal, *, limit: int) -> Rows:
    """Rows that are fetched when they are needed; the `limit` chunks used last are kept."""
    return _RecentRows(chunks, seal, limit)


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
        self, chunks: Chunks, values: npt.NDArray[Any], load: Callable[[int], None]
    ) -> None:
        self._chunk_rows = chunks.chunk_rows
        self._dtype = np.dtype(chunks.spec.dtype)
        self._values = values
        self._load = load
        self._missing = set(range(chunks.chunk_count))
        self._lock = lock_for(fetched=is_fetched(chunks))

    def read(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """Copy rows in the order given."""
        if self._missing:
            self.touch(rows)
        return self._values.take(rows, axis=0).astype(self._dtype, copy=False)

    def read_all(self) -> npt.NDArray[Any]:
        """Copy every row."""
        self._load_all(self._missing)
        return self._values.astype(self._dtype)

    def touch(self, rows: npt.NDArray[np.intp]) -> None:
        """Have rows at hand that will be read."""
        self._load_all(set((rows // self._chunk_rows).tolist()))

    def _load_all(self, chunks: set[int]) -> None:
        # Two threads may load one file at once: both bring the same, and neither reads before.
        with self._lock:
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

    def touch(self, rows: npt.NDArray[np.intp]) -> None:
        """Mapping is so cheap that nothing is gained by doing it early."""


class _RecentRows:
    """Rows of chunks that are fetched whole, of which the last ones used are kept."""

    def __init__(self, chunks: Chunks, seal: Seal, limit: int) -> None:
        self._chunks = chunks
        self._seal = seal
        self._limit = limit
        self._kept: dict[int, npt.NDArray[Any]] = {}
        self._lock = lock_for(fetched=True)

    def read(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """Copy rows in the order given."""
        size = self._chunks.chunk_rows
        out = np.empty((len(rows), *self._chunks.spec.shape), self._chunks.spec.dtype)
        numbers = rows // size
        # Chunk by chunk, so that each is fetched once even when fewer are kept than are needed.
        for chunk in np.unique(numbers).tolist():
            where = numbers == chunk
            out[where] = self._get(chunk)[rows[where] - chunk * size]
        return out

    def read_all(self) -> npt.NDArray[Any]:
        """Copy every row."""
        chunks = range(self._chunks.chunk_count)
        joined: npt.NDArray[Any] = np.concatenate([self._get(chunk) for chunk in chunks])
        return joined.astype(self._chunks.spec.dtype, copy=False)

    def touch(self, rows: npt.NDArray[np.intp]) -> None:
        """Have rows at hand that will be read."""
        for chunk in np.unique(rows // self._chunks.chunk_rows).tolist():
            self._get(chunk)

    def _get(self, chunk: int) -> npt.NDArray[Any]:
        with self._lock:
            found = self._kept.pop(chunk, None)
            if found is None:
                found = self._chunks.load(chunk, sealed=self._seal(chunk))
            # At the end, so that the one that was not used for longest comes first.
            self._kept[chunk] = found
            if len(self._kept) > self._limit:
                del self._kept[next(iter(self._kept))]
            return found


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
