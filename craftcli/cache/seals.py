"""What the commit records vouch for: the checksum that each chunk file must have."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from craftcli.cache.chunks import ChunkFiles, DamagedChunkError, seal_of
from craftcli.errors import CraftError


class Seals:
    """The checksums of all chunk files, each chunk's compared with its record when first asked for.

    A file may be sound in itself and still hold the rows of another chunk or of another cache.
    """

    def __init__(self, path: Path, files: Mapping[str, ChunkFiles], names: Sequence[str]) -> None:
        self._path = path
        self._commit = files["commit"]
        self._arrays = {name: files[name] for name in sorted(names)}
        self._known: dict[int, dict[str, bytes]] = {}
        self._mark = _mark(path)

    def checksum(self, name: str, chunk: int) -> bytes:
        """The checksum that a chunk of the array must have.

        Raises:
            DamagedChunkError: some file of this chunk is not what was committed.
            CraftError: another cache is now at the path.
        """
        if chunk not in self._known:
            self._check_same_cache()
            try:
                self._known[chunk] = self._read(chunk)
            except DamagedChunkError as error:
                # The checksums alone do not tell which file is bad.
                raise DamagedChunkError("; ".join(self.problems(chunk)) or str(error)) from error
        return self._known[chunk][name]

    def problems(self, chunk: int) -> list[str]:
        """Read a chunk of all arrays and its commit record; what is wrong with them."""
        damaged = [files.damage(chunk) for files in self._arrays.values()]
        found = [problem for problem in damaged if problem]
        if found:
            # The record of a chunk with a bad file cannot match; saying so would be noise.
            return found
        try:
            self._read(chunk)
        except DamagedChunkError as error:
            return [str(error)]
        return []

    def _read(self, chunk: int) -> dict[str, bytes]:
        checksums = {name: files.checksum(chunk) for name, files in self._arrays.items()}
        if int(self._commit.load(chunk)[0]) == seal_of(checksums.values()):
            return checksums
        files = next(iter(self._arrays.values()))
        first = chunk * files.chunk_rows
        last = min(first + files.chunk_rows, files.rows) - 1
        raise DamagedChunkError(
            f"commit chunk {chunk} (rows {first} to {last}): the record does not match the "
            "arrays, of which one was changed or swapped"
        )

    def _check_same_cache(self) -> None:
        if _mark(self._path) != self._mark:
            raise CraftError(
                f"Cache {self._path} was replaced or removed while it was in use.",
                why="what is there now is not what was opened.",
                fix="start again; build to another path while a training reads this one.",
            )


def _mark(path: Path) -> tuple[int, int] | None:
    """What tells a cache from another that takes its place; None when there is none."""
    try:
        found = (path / "zarr.json").stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
