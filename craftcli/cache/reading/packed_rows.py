"""Random access to the rows of a packed array, in memory, mapped or fetched.

Rows stay packed where they are kept: only those of a batch get their empty slots back.
"""

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt

from craftcli.cache.reading.file_sizes import FileSizes
from craftcli.cache.reading.prefetch import is_fetched, lock_for
from craftcli.cache.reading.rows import CommittedChecksum
from craftcli.cache.storage.packed_chunks import PackedChunks, PackedFiles, PackedRows


class PackedAccess:
    """Rows of packed chunks, of which the `limit` most recently used are kept."""

    def __init__(
        self, chunks: PackedChunks, committed: CommittedChecksum, limit: int, *, copy: bool
    ) -> None:
        """With `copy`, rows are copied from the files in which they are mapped."""
        self._chunks = chunks
        self._committed = committed
        self._limit = limit
        self._copy = copy
        self._sizes = None
        if isinstance(chunks, PackedFiles) and not copy:
            self._sizes = FileSizes(chunks)
        self._kept: dict[int, PackedRows] = {}
        self._fetched = is_fetched(chunks)
        self._lock = lock_for(fetched=self._fetched)

    def read(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """Copy rows in the order given."""
        size, numbers = self._chunks.chunk_rows, rows.tolist()
        out = np.zeros((len(numbers), *self._chunks.spec.shape), self._chunks.spec.dtype)
        # Chunk by chunk, so that each is fetched once even when not all of them can be kept.
        places: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            places.setdefault(number // size, []).append(place)
        for chunk in sorted(places):
            found = self._get(chunk)
            for place in places[chunk]:
                found.copy_row(numbers[place] % size, out[place])
        return out

    def read_all(self) -> npt.NDArray[Any]:
        """Copy every row."""
        out = np.zeros(self._chunks.shape, self._chunks.spec.dtype)
        size = self._chunks.chunk_rows
        for chunk in range(self._chunks.chunk_count):
            self._get(chunk).copy_all(out[chunk * size : (chunk + 1) * size])
        return out

    def load(self, rows: npt.NDArray[np.intp]) -> None:
        """Load the chunks of rows that will be read soon."""
        for chunk in np.unique(rows // self._chunks.chunk_rows).tolist():
            self._get(chunk)

    def _get(self, chunk: int) -> PackedRows:
        with self._lock:
            found = self._kept.get(chunk)
            if found is None:
                found = self._kept[chunk] = self._open(chunk)
                self._drop_surplus()
            elif self._fetched:
                # At the end, so that the least recently used comes first.
                self._kept[chunk] = self._kept.pop(chunk)
            if self._sizes:
                self._sizes.check([chunk])
            return found

    def _open(self, chunk: int) -> PackedRows:
        rows = self._chunks.open(chunk, committed=self._committed(chunk))
        if self._sizes:
            self._sizes.watch(chunk, rows.pieces.nbytes)
        return rows.copied() if self._copy else rows

    def _drop_surplus(self) -> None:
        # Without a lock another thread may drop one at the same time.
        with contextlib.suppress(KeyError, RuntimeError, StopIteration):
            while len(self._kept) > self._limit:
                del self._kept[next(iter(self._kept))]
