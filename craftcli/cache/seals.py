"""What the commit records vouch for: the checksum that each chunk must have."""

from collections.abc import Sequence

from craftcli.cache.chunks import DamagedChunkError, seal_of
from craftcli.cache.fetching import is_fetched, lock_for, map_over
from craftcli.cache.store import OpenedCache
from craftcli.errors import CraftError


class Seals:
    """The checksums of all chunks, each chunk's compared with its record when first asked for.

    A file may be sound in itself and still hold the rows of another chunk or of another cache.
    """

    def __init__(self, opened: OpenedCache, names: Sequence[str]) -> None:
        self._folder = opened.folder
        self._commit = opened.chunks["commit"]
        self._arrays = {name: opened.chunks[name] for name in sorted(names)}
        self._known: dict[int, dict[str, bytes]] = {}
        self._mark = opened.folder.mark()
        self._fetched = any(map(is_fetched, self._arrays.values()))
        self._lock = lock_for(fetched=self._fetched)

    def checksum(self, name: str, chunk: int) -> bytes:
        """The checksum that a chunk of the array must have.

        Raises:
            DamagedChunkError: some file of this chunk is not what was committed.
            CraftError: another cache is now at the path.
        """
        if chunk not in self._known:
            with self._lock:
                self._learn(chunk)
        return self._known[chunk][name]

    def problems(self, chunk: int) -> list[str]:
        """Read a chunk of all arrays and its commit record; what is wrong with them."""
        arrays = self._arrays.values()
        damaged = map_over(lambda chunks: chunks.damage(chunk), arrays, fetched=self._fetched)
        found = [problem for problem in damaged if problem]
        if found:
            # The record of a chunk with a bad file cannot match; saying so would be noise.
            return found
        try:
            self._read(chunk)
        except DamagedChunkError as error:
            return [str(error)]
        return []

    def _learn(self, chunk: int) -> None:
        # Another thread may have done it while this one waited for the lock.
        if chunk in self._known:
            return
        self._check_same_cache()
        try:
            self._known[chunk] = self._read(chunk)
        except DamagedChunkError as error:
            # The checksums alone do not tell which file is bad.
            raise DamagedChunkError("; ".join(self.problems(chunk)) or str(error)) from error

    def _read(self, chunk: int) -> dict[str, bytes]:
        arrays = self._arrays.values()
        found = map_over(lambda chunks: chunks.checksum(chunk), arrays, fetched=self._fetched)
        checksums = dict(zip(self._arrays, found, strict=True))
        if int(self._commit.load(chunk)[0]) == seal_of(checksums.values()):
            return checksums
        any_array = next(iter(self._arrays.values()))
        first = chunk * any_array.chunk_rows
        last = min(first + any_array.chunk_rows, any_array.rows) - 1
        raise DamagedChunkError(
            f"commit chunk {chunk} (rows {first} to {last}): the record does not match the "
            "arrays, of which one was changed or swapped"
        )

    def _check_same_cache(self) -> None:
        if self._folder.mark() != self._mark:
            raise CraftError(
                f"Cache {self._folder.path} was replaced or removed while it was in use.",
                why="what is there now is not what was opened.",
                fix="start again; build to another path while a training reads this one.",
            )
