"""Reads random rows of a complete cache; a chunk is checked when one of its rows is first used."""

import difflib
import hashlib
import os
from collections.abc import Iterable
from datetime import datetime
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from craftcli.cache.format import layer_names
from craftcli.cache.reading.checksums import CommittedChecksums
from craftcli.cache.reading.packed_rows import PackedAccess
from craftcli.cache.reading.prefetch import is_fetched, map_over, run_in_background
from craftcli.cache.reading.rows import RowAccess, rows_fetched, rows_in_files, rows_in_memory
from craftcli.cache.stats import LayerStats
from craftcli.cache.storage.chunk_files import ChunkFiles
from craftcli.cache.storage.chunks import ArraySpec, DamagedChunkError
from craftcli.cache.storage.packed_chunks import PackedChunks
from craftcli.cache.storage.zarr_layout import OpenedCache, open_cache
from craftcli.errors import CraftError
from craftcli.locations import Location, locate
from craftcli.system.file_mapping import MAX_MAPPINGS
from craftcli.system.memory import free_bytes

MEMORY = ("auto", "ram", "mmap")
# Rows may take a quarter of the free memory: policy, gradients and system need the rest.
_RAM_SHARE = 4
# Arrays this many times narrower than the widest are kept in memory: mappings would be wasted.
_NARROW = 256
_REBUILD = "rebuild it with craft cache build --overwrite; craft cache inspect --verify lists all."


class CacheReader:
    """Random access to a complete cache; safe to share between threads and with forked workers.

    Open a cache once and pass the reader on: it keeps the chunks that were checked and loaded.

    With `memory` "ram", rows are kept in memory once they were read. With "mmap" they stay in their
    mapped files. "auto" takes "ram" when all rows fit into a quarter of the free memory. Remote and
    compressed chunks cannot be mapped: they are fetched whole, and the most recently used are kept.
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
        self._rows: dict[str, RowAccess] = {}
        self._checksums = CommittedChecksums(opened, list(opened.specs))

    @classmethod
    def open(cls, path: str | Location, *, memory: str = "auto") -> Self:
        """Open a complete cache and check its metadata; chunks are checked when they are read."""
        path = locate(path)
        return cls(path, open_cache(path), memory=memory)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all rows, empty slots included."""
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
                fix=f"read {close[0]}, or rebuild the cache for this policy.",
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
        # For a batch, faster than numpy's own minimum and maximum.
        plain = numbers.tolist()
        lowest, highest = min(plain), max(plain)
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
            found = LayerStats(mean=mean, variance=variance, count=count)
            self._check_stats(layer, found)
        except DamagedChunkError as error:
            raise self._damaged(error) from error
        return found

    @property
    def stats_sealed(self) -> bool | None:
        """Whether digests cover the statistics, which older caches lack; None without any."""
        if "hidden" not in self.manifest.kinds:
            return None
        return self.manifest.stats_digests is not None

    def _check_stats(self, layer: str, stats: LayerStats) -> None:
        sealed = self.manifest.stats_digests
        if sealed is not None and sealed.get(layer) != stats.digest():
            raise DamagedChunkError(
                f"stats/{layer}: the statistics are not those that the build computed, they were "
                "changed or swapped"
            )

    def content_digest(self) -> str:
        """Digest of the commit records and statistics: a cache of other rows has another one."""
        names = self.array_names()
        commit = self._chunks["commit"]
        stats = [self._chunks[name] for name in sorted(self._chunks) if name.startswith("stats/")]
        digest = hashlib.sha256(f"{self.manifest.rows} {' '.join(names)}".encode())
        try:
            chunks = range(self.manifest.chunk_count)
            for record in map_over(commit.load, chunks, fetched=is_fetched(commit)):
                digest.update(int(record[0]).to_bytes(4, "little"))
            for each in stats:
                digest.update(each.name.encode() + each.checksum(0))
        except DamagedChunkError as error:
            raise self._damaged(error) from error
        return digest.hexdigest()

    def row_bytes(self) -> int:
        """Bytes that a row takes over all arrays; the mean, where rows are packed."""
        whole, packed = 0, list[str]()
        for name, spec in self._specs.items():
            chunks = self._chunks[name]
            if isinstance(chunks, PackedChunks):
                packed += map(chunks.key, range(chunks.chunk_count))
            else:
                whole += spec.row_bytes
        sizes = map_over(self._folder.file_size, packed, fetched=self.fetches)
        return whole + round(sum(size or 0 for size in sizes) / self.manifest.rows)

    def size_on_disk(self) -> int:
        """Bytes of all files."""
        return self._folder.size()

    def modified(self) -> datetime:
        """When the cache was finished, by the modification time of its files."""
        return self._folder.modified()

    @property
    def fetches(self) -> bool:
        """Whether reading waits for a store or a codec, so that `prefetch` helps."""
        return any(is_fetched(self._chunks[name]) for name in self._specs)

    def prefetch(self, rows: npt.NDArray[np.integer[Any]], names: Iterable[str]) -> None:
        """Fetch rows of these arrays in the background, because they will be read soon."""
        for name in names:
            if is_fetched(self._chunks[name]):
                run_in_background(partial(self._array(name).load, np.asarray(rows, np.intp)))

    def verify(self) -> list[str]:
        """Check every chunk against its checksum and commit record; list the problems."""
        problems: list[str] = []
        for chunk in range(self.manifest.chunk_count):
            problems += self._checksums.problems(chunk)
        stats = [chunks for name, chunks in self._chunks.items() if name.startswith("stats/")]
        damaged = [problem for chunks in stats if (problem := chunks.damage(0))]
        return problems + (damaged or self._unsealed_stats())

    def _unsealed_stats(self) -> list[str]:
        """Problems with statistics that can be read but are not those that the build wrote."""
        problems = []
        for layer in layer_names(self.manifest) if self.stats_sealed else []:
            try:
                self.stats(layer)
            except CraftError as error:
                problems.append(error.why.removesuffix("."))
        return problems

    def _array(self, name: str) -> RowAccess:
        """The rows of an array, in memory, mapped or fetched."""
        if name not in self._rows:
            chunks, committed = self._chunks[name], partial(self._checksums.checksum, name)
            widest = max(spec.row_bytes for spec in self._specs.values())
            rows: RowAccess
            if isinstance(chunks, PackedChunks):
                limit = self._packed_limit(chunks)
                rows = PackedAccess(chunks, committed, limit, copy=self.memory == "ram")
            elif self.memory == "ram" or chunks.spec.row_bytes * _NARROW <= widest:
                rows = rows_in_memory(chunks, committed)
            elif isinstance(chunks, ChunkFiles):
                rows = rows_in_files(chunks, committed, limit=self._most_mappings)
            else:
                rows = rows_fetched(chunks, committed, limit=self._chunks_that_fit())
            # Two threads that come here at once must use the same object.
            self._rows.setdefault(name, rows)
        return self._rows[name]

    @property
    def _most_mappings(self) -> int:
        """How many files of every array may be mapped."""
        return MAX_MAPPINGS // len(self._specs) or 1

    def _packed_limit(self, chunks: PackedChunks) -> int:
        """How many packed chunks of an array may be kept, or mapped."""
        if self.memory == "ram":
            return chunks.chunk_count
        return self._chunks_that_fit() if is_fetched(chunks) else self._most_mappings

    def _chunks_that_fit(self) -> int:
        """How many chunks of every array may be kept in memory."""
        all_arrays = self.payload_bytes / self.manifest.chunk_count
        return max(1, int(free_bytes() / _RAM_SHARE / _local_processes() / all_arrays))

    def _damaged(self, error: DamagedChunkError) -> CraftError:
        return CraftError(f"Cache {self.path} is damaged.", why=f"{error}.", fix=_REBUILD)


def _choose_memory(payload_bytes: int) -> str:
    """Keep rows of that total size in memory, or leave them in their files."""
    return "ram" if payload_bytes * _RAM_SHARE * _local_processes() <= free_bytes() else "mmap"


def _local_processes() -> int:
    """Processes of one torchrun on this machine; each of them would keep a copy."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
