"""Reading a cache: random rows of a complete one, each chunk checked at its first touch."""

import difflib
import os
from collections.abc import Iterable
from datetime import datetime
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from craftcli.cache.chunk_files import ChunkFiles
from craftcli.cache.chunks import ArraySpec, DamagedChunkError
from craftcli.cache.fetching import begin, is_fetched
from craftcli.cache.memory import free_bytes
from craftcli.cache.rows import Rows, rows_fetched, rows_in_files, rows_in_memory
from craftcli.cache.seals import Seals
from craftcli.cache.stats import LayerStats
from craftcli.cache.store import OpenedCache, open_cache
from craftcli.errors import CraftError
from craftcli.locations import Location, locate

MEMORY = ("auto", "ram", "mmap")
# Of the free memory: the policy, its gradients and the system need the rest.
_RAM_SHARE = 4
# Linux allows a process 65530 mappings by default, and torch needs some of them.
_MAX_MAPPINGS = 32768
# Arrays this many times narrower than the widest are not worth mappings of their own.
_NARROW = 256
_REBUILD = "rebuild it with craft cache build --overwrite; craft cache inspect --verify lists all."


class CacheReader:
    """Random access to a complete cache; safe to share between threads and with forked workers.

    With `memory` "ram" rows are kept in memory once they were read, with "mmap" they stay in their
    mapped files, and "auto" takes "ram" when all rows fit into a quarter of the free memory.
    What cannot be mapped, because it is remote or compressed, is fetched by whole chunks instead,
    of which the last ones used are kept.
    """

    def __init__(self, path: Location, opened: OpenedCache, *, memory: str = "auto") -> None:
        if memory not in MEMORY:
            raise ValueError(f"memory is {memory!r}, not one of {', '.join(MEMORY)}")
        self.path = path
        self.manifest = opened.manifest
        self.tasks = opened.tasks
        self._specs = opened.specs
        self._chunks = opened.chunks
        self._folder = opened.folder
        self.memory = _choose_memory(self.payload_bytes) if memory == "auto" else memory
        self._rows: dict[str, Rows] = {}
        self._seals = Seals(opened, list(opened.specs))

    @classmethod
    def open(cls, path: str | Location, *, memory: str = "auto") -> Self:
        """Open a cache, or say what is wrong with it; chunks are checked when they are read."""
        path = locate(path)
        return cls(path, open_cache(path), memory=memory)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all rows."""
        return self.manifest.rows * sum(spec.row_bytes for spec in self._specs.values())

    def __repr__(self) -> str:
        return (
            f"CacheReader({str(self.path)!r}, rows={self.manifest.rows}, "
            f"arrays={len(self._specs)}, memory={self.memory!r})"
        )

    def array_names(self) -> list[str]:
        """Names of the arrays with a row axis, sorted."""
        return sorted(self._specs)

    def spec(self, name: str) -> ArraySpec:
        """Row shape and dtype of an array."""
        if name not in self._specs:
            close = difflib.get_close_matches(name, self._specs, n=1, cutoff=0.0)
            raise CraftError(
                f"Cache {self.path} has no array {name}.",
                why=f"it has {', '.join(self.array_names())}.",
                fix=f"ask for {close[0]}, or rebuild the cache for this policy.",
            )
        return self._specs[name]

    def read(self, name: str, rows: npt.NDArray[np.integer[Any]]) -> npt.NDArray[Any]:
        """Copy rows in the order given; a row may come twice.

        Raises:
            CraftError: there is no such array, or a chunk of it is missing or damaged.
            IndexError: a row is negative or beyond the last.
        """
        spec = self.spec(name)
        rows = np.asarray(rows)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise TypeError(f"rows must be a list of integers, got {rows.dtype} {rows.shape}")
        if not rows.size:
            return np.empty((0, *spec.shape), spec.dtype)
        numbers: npt.NDArray[np.intp] = rows.astype(np.intp, copy=False)
        # For a batch, faster than asking numpy.
        wanted = numbers.tolist()
        lowest, highest = min(wanted), max(wanted)
        if lowest < 0 or highest >= self.manifest.rows:
            raise IndexError(f"rows {lowest}..{highest} are not in 0..{self.manifest.rows - 1}")
        try:
            return self._array(name).read(numbers)
        except DamagedChunkError as error:
            raise self._damaged(error) from error

    def read_all(self, name: str) -> npt.NDArray[Any]:
        """Copy every row."""
        self.spec(name)
        try:
            return self._array(name).read_all()
        except DamagedChunkError as error:
            raise self._damaged(error) from error

    def stats(self, layer: str) -> LayerStats:
        """Statistics of one layer's targets; `layer` is a name from `format.layer_names`."""
        names = (f"stats/{layer}/{name}" for name in ("mean", "variance", "count"))
        chunks = [self._chunks[name] for name in names]
        try:
            mean, variance, count = (each.load(0).astype(each.spec.dtype) for each in chunks)
        except DamagedChunkError as error:
            raise self._damaged(error) from error
        return LayerStats(mean=mean, variance=variance, count=count)

    def size_on_disk(self) -> int:
        """Bytes of all files."""
        return self._folder.size()

    def modified(self) -> datetime:
        """When the cache was finished, by the time of its files."""
        return self._folder.modified()

    @property
    def fetches(self) -> bool:
        """Whether rows have to be waited for, so that `prefetch` is of use."""
        return any(is_fetched(self._chunks[name]) for name in self._specs)

    def prefetch(self, rows: npt.NDArray[np.integer[Any]], names: Iterable[str]) -> None:
        """Begin to fetch rows of those arrays that will be read soon."""
        for name in names:
            if is_fetched(self._chunks[name]):
                begin(partial(self._array(name).touch, np.asarray(rows, np.intp)))

    def verify(self) -> list[str]:
        """Read every chunk and check it against its checksum and commit record; the problems."""
        problems: list[str] = []
        for chunk in range(self.manifest.chunk_count):
            problems += self._seals.problems(chunk)
        stats = [chunks for name, chunks in self._chunks.items() if name.startswith("stats/")]
        problems += [problem for chunks in stats if (problem := chunks.damage(0))]
        return problems

    def _array(self, name: str) -> Rows:
        """The rows of an array, kept in the way that suits it."""
        if name not in self._rows:
            chunks, seal = self._chunks[name], partial(self._seals.checksum, name)
            widest = max(spec.row_bytes for spec in self._specs.values())
            if self.memory == "ram" or chunks.spec.row_bytes * _NARROW <= widest:
                rows = rows_in_memory(chunks, seal)
            elif isinstance(chunks, ChunkFiles):
                rows = rows_in_files(chunks, seal, limit=_MAX_MAPPINGS // len(self._specs) or 1)
            else:
                rows = rows_fetched(chunks, seal, limit=self._chunks_that_fit())
            # When two threads come here at once, both must go on with the same object.
            self._rows.setdefault(name, rows)
        return self._rows[name]

    def _chunks_that_fit(self) -> int:
        """How many chunks of every array may be kept in memory."""
        all_arrays = self.payload_bytes / self.manifest.chunk_count
        return max(1, int(free_bytes() / _RAM_SHARE / _local_processes() / all_arrays))

    def _damaged(self, error: DamagedChunkError) -> CraftError:
        return CraftError(f"Cache {self.path} is damaged.", why=f"{error}.", fix=_REBUILD)


def _choose_memory(payload_bytes: int) -> str:
    """Whether rows of that size are better kept in memory."""
    return "ram" if payload_bytes * _RAM_SHARE * _local_processes() <= free_bytes() else "mmap"


def _local_processes() -> int:
    """Processes of one torchrun on this machine, of which each would keep a copy."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
