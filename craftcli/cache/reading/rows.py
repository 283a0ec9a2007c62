"""Random access to the rows of one array: in memory, mapped or fetched.

A chunk is checked when one of its rows is first used. Batches are small, so Python code would take
most of the time: once the chunks are loaded, reading a batch runs almost none.
"""

import contextlib
import mmap
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from craftcli.cache.reading.file_sizes import FileSizes
from craftcli.cache.reading.prefetch import is_fetched, lock_for
from craftcli.cache.storage.chunk_files import ChunkFiles
from craftcli.cache.storage.chunks import Chunks
from craftcli.system.file_mapping import SIDE_BY_SIDE, MappedFiles

CommittedChecksum = Callable[[int], bytes | None]
"""The checksum that a chunk must have, by the chunk's number; None if it is not known."""


class RowAccess(Protocol):
    """Random access to one array; callers have checked that `rows` are in range."""

    def read(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """Copy rows in the order given."""
        ...

    def read_all(self) -> npt.NDArray[Any]:
        """Copy every row."""
        ...

    def load(self, rows: npt.NDArray[np.intp]) -> None:
        """Load the chunks of rows that will be read soon."""
        ...


def rows_in_memory(chunks: Chunks, committed: CommittedChecksum) -> RowAccess:
    """Rows that are copied to memory."""
    # No memory is taken before chunks are copied to it.
    values = np.empty(chunks.shape, chunks.stored_dtype)

    def load(chunk: int) -> None:
        start = chunk * chunks.chunk_rows
        place = values[start : start + chunks.chunk_rows]
        chunks.load_into(chunk, place, committed=committed(chunk))

    return ContiguousRows(chunks, values, load)


def rows_fetched(chunks: Chunks, committed: CommittedChecksum, *, limit: int) -> RowAccess:
    """Rows that are fetched when they are read; the `limit` most recently used chunks are kept."""
    return RecentRows(chunks, committed, limit)


def rows_in_files(files: ChunkFiles, committed: CommittedChecksum, *, limit: int) -> RowAccess:
    """Rows that stay in their files; at most `limit` files are mapped at a time."""
    aligned = files.payload_bytes % mmap.PAGESIZE == 0
    if not (SIDE_BY_SIDE and aligned and files.chunk_count <= limit):
        return ScatteredRows(files, committed, limit)
    mapped = MappedFiles(files.chunk_count * files.payload_bytes)
    values = mapped.values.view(files.stored_dtype).reshape(-1, *files.spec.shape)

    sizes = FileSizes(files)

    def load(chunk: int) -> None:
        files.map_into(chunk, mapped, chunk * files.payload_bytes, committed=committed(chunk))
        sizes.watch(chunk, files.payload_bytes)

    return ContiguousRows(files, values[: files.rows], load, before_read=sizes.check)


class ContiguousRows:
    """Rows in one array, so that numpy picks any of them in one call."""

    def __init__(
        self,
        chunks: Chunks,
        values: npt.NDArray[Any],
        load: Callable[[int], None],
        *,
        before_read: Callable[[Iterable[int]], None] | None = None,
    ) -> None:
        """`before_read` gets the chunks of rows that are about to be read."""
        self._chunk_rows = chunks.chunk_rows
        self._dtype = np.dtype(chunks.spec.dtype)
        self._values = values
        self._load_chunk = load
        self._before_read = before_read
        self._all = range(chunks.chunk_count)
        self._missing = set(self._all)
        self._lock = lock_for(fetched=is_fetched(chunks))

    def read(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """Copy rows in the order given."""
        if self._missing:
            self.load(rows)
        if self._before_read:
            self._before_read(set((rows // self._chunk_rows).tolist()))
        return self._values.take(rows, axis=0).astype(self._dtype, copy=False)

    def read_all(self) -> npt.NDArray[Any]:
        """Copy every row."""
        self._load_all(self._missing)
        if self._before_read:
            self._before_read(self._all)
        return self._values.astype(self._dtype)

    def load(self, rows: npt.NDArray[np.intp]) -> None:
        """Load the chunks of rows that will be read soon."""
        self._load_all(set((rows // self._chunk_rows).tolist()))

    def _load_all(self, chunks: set[int]) -> None:
        # Without a lock two threads may load one file at once: both copy the same bytes, and
        # neither reads before it has done so.
        with self._lock:
            for chunk in sorted(self._missing & chunks):
                self._load_chunk(chunk)
                self._missing.discard(chunk)


class ScatteredRows:
    """Rows in chunks that are mapped one by one, at any address."""

    def __init__(self, files: ChunkFiles, committed: CommittedChecksum, limit: int) -> None:
        self._files = files
        self._chunks = _MappedChunks(files, committed, limit)

    def read(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """Copy rows in the order given."""
        size, chunks = self._files.chunk_rows, self._chunks
        chunks.check_sizes(set((rows // size).tolist()))
        # Concatenating single rows is faster than sorting them by chunk, and flat ones are fastest.
        parts = [chunks[row // size][row % size] for row in rows.tolist()]
        joined: npt.NDArray[Any] = np.concatenate(parts)
        return joined.reshape(-1, *self._files.spec.shape)

    def read_all(self) -> npt.NDArray[Any]:
        """Copy every row."""
        out = np.empty(self._files.shape, self._files.stored_dtype)
        flat, size = out.reshape(len(out), -1), self._files.chunk_rows
        for chunk in range(self._files.chunk_count):
            self._chunks.check_sizes([chunk])
            flat[chunk * size : (chunk + 1) * size] = self._chunks[chunk]
        return out.astype(self._files.spec.dtype, copy=False)

    def load(self, rows: npt.NDArray[np.intp]) -> None:
        """Do nothing: mapping is so cheap that doing it early gains nothing."""


class RecentRows:
    """Rows of chunks that are fetched whole; the most recently used chunks are kept."""

    def __init__(self, chunks: Chunks, committed: CommittedChecksum, limit: int) -> None:
        self._chunks = chunks
        self._committed = committed
        self._limit = limit
        self._kept: dict[int, npt.NDArray[Any]] = {}
        self._lock = lock_for(fetched=True)

    def read(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """Copy rows in the order given."""
        size = self._chunks.chunk_rows
        out = np.empty((len(rows), *self._chunks.spec.shape), self._chunks.spec.dtype)
        numbers = rows // size
        # Chunk by chunk, so that each is fetched once even when not all of them can be kept.
        for chunk in np.unique(numbers).tolist():
            where = numbers == chunk
            out[where] = self._get(chunk)[rows[where] - chunk * size]
        return out

    def read_all(self) -> npt.NDArray[Any]:
        """Copy every row."""
        chunks = range(self._chunks.chunk_count)
        joined: npt.NDArray[Any] = np.concatenate([self._get(chunk) for chunk in chunks])
        return joined.astype(self._chunks.spec.dtype, copy=False)

    def load(self, rows: npt.NDArray[np.intp]) -> None:
        """Load the chunks of rows that will be read soon."""
        for chunk in np.unique(rows // self._chunks.chunk_rows).tolist():
            self._get(chunk)

    def _get(self, chunk: int) -> npt.NDArray[Any]:
        with self._lock:
            found = self._kept.pop(chunk, None)
            if found is None:
                found = self._chunks.load(chunk, committed=self._committed(chunk))
            # At the end, so that the least recently used comes first.
            self._kept[chunk] = found
            if len(self._kept) > self._limit:
                del self._kept[next(iter(self._kept))]
            return found


class _MappedChunks(dict[int, npt.NDArray[Any]]):
    """Mapped chunks by number, each row flat; a missing one is mapped when it is looked up."""

    def __init__(self, files: ChunkFiles, committed: CommittedChecksum, limit: int) -> None:
        super().__init__()
        self._files = files
        self._committed = committed
        self._limit = limit
        self._checked: set[int] = set()
        self._sizes = FileSizes(files)

    def check_sizes(self, chunks: Iterable[int]) -> None:
        """Raise a DamagedChunkError if a mapped file was made shorter."""
        self._sizes.check(chunk for chunk in chunks if chunk in self)

    def __missing__(self, chunk: int) -> npt.NDArray[Any]:
        check = chunk not in self._checked
        rows = self._files.load(chunk, check=check, committed=self._committed(chunk))
        self._checked.add(chunk)
        self._sizes.watch(chunk, self._files.payload_bytes)
        if len(self) >= self._limit:
            # Rows come in random order: any chunk may go. A batch that uses it keeps its mapping.
            with contextlib.suppress(KeyError):
                self.popitem()
        self[chunk] = flat = rows.reshape(len(rows), -1)
        return flat
