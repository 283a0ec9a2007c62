"""The checksums that the commit records vouch for."""

from collections.abc import Sequence

from craftcli.cache.reading.prefetch import is_fetched, lock_for, map_over
from craftcli.cache.storage.chunks import DamagedChunkError, commit_record
from craftcli.cache.storage.zarr_layout import OpenedCache
from craftcli.errors import CraftError


class CommittedChecksums:
    """The checksum of every chunk, compared with the chunk's commit record at its first use.

    The record is needed because a file with a valid checksum can still hold the rows of another
    chunk or of another cache.
    """

    def __init__(self, opened: OpenedCache, names: Sequence[str]) -> None:
        self._folder = opened.folder
        self._records = opened.chunks["commit"]
        self._arrays = {name: opened.chunks[name] for name in sorted(names)}
        self._known: dict[int, dict[str, bytes]] = {}
        self._mark = opened.folder.version_mark()
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
        """Read a chunk of all arrays and its commit record; list what is wrong with them."""
        arrays = self._arrays.values()
        damaged = map_over(lambda chunks: chunks.damage(chunk), arrays, fetched=self._fetched)
        found = [problem for problem in damaged if problem]
        if found:
            # The record cannot match either; saying so would be noise.
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
            # The checksums alone do not show which file is bad.
            raise DamagedChunkError("; ".join(self.problems(chunk)) or str(error)) from error

    def _read(self, chunk: int) -> dict[str, bytes]:
        arrays = self._arrays.values()
        found = map_over(lambda chunks: chunks.checksum(chunk), arrays, fetched=self._fetched)
        checksums = dict(zip(self._arrays, found, strict=True))
        if int(self._records.load(chunk)[0]) == commit_record(checksums.values()):
            return checksums
        any_array = next(iter(self._arrays.values()))
        first = chunk * any_array.chunk_rows
        last = min(first + any_array.chunk_rows, any_array.rows) - 1
        raise DamagedChunkError(
            f"commit chunk {chunk} (rows {first} to {last}): the record does not match the "
            "arrays, one was changed or swapped"
        )

    def _check_same_cache(self) -> None:
        if self._folder.version_mark() != self._mark:
            raise CraftError(
                f"Cache {self._folder.path} was replaced or removed while it was in use.",
                why="another cache, or none, is now at the path.",
                fix="start again; build to another path while a training reads this one.",
            )
