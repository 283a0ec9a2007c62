"""Reading a cache: random rows of a complete one, each chunk checked at its first touch."""

import difflib
import functools
import os
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from craftcli.cache.chunks import ArraySpec, DamagedChunkError, commit_record
from craftcli.cache.stats import LayerStats
from craftcli.cache.store import OpenedCache, open_cache
from craftcli.errors import CraftError

# Linux allows a process 65530 mappings by default, and torch needs some of them.
_MAX_MAPPINGS = 16384
_REBUILD = "rebuild it with craft cache build --overwrite; craft cache inspect --verify lists all."


class CacheReader:
    """Random access to a complete cache; safe to share between threads and with forked workers."""

    def __init__(self, path: Path, opened: OpenedCache) -> None:
        self.path = path
        self.manifest = opened.manifest
        self.tasks = opened.tasks
        self._specs = opened.specs
        self._files = opened.files
        self._checked: set[tuple[str, int]] = set()
        self._chunk = functools.lru_cache(maxsize=_MAX_MAPPINGS)(self._load_chunk)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a cache, or say what is wrong with it; chunks are checked when they are read."""
        return cls(path, open_cache(path))

    def __repr__(self) -> str:
        return (
            f"CacheReader({str(self.path)!r}, rows={self.manifest.rows}, arrays={len(self._specs)})"
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
        wanted: list[int] = rows.tolist()
        lowest, highest = min(wanted), max(wanted)
        if lowest < 0 or highest >= self.manifest.rows:
            raise IndexError(f"rows {lowest}..{highest} are not in 0..{self.manifest.rows - 1}")
        size = self.manifest.rows_per_chunk
        only = lowest // size
        if only == highest // size:
            inside = rows.astype(np.intp, copy=False) - only * size
            # Unlike concatenate, take keeps a byte order that is not the machine's.
            return self._chunk(name, only).take(inside, axis=0).astype(spec.dtype, copy=False)
        # Chunks stay mapped: for a batch, joining single rows beats sorting the rows by chunk.
        located = [(row // size, row % size) for row in wanted]
        return np.concatenate([self._chunk(name, chunk)[at : at + 1] for chunk, at in located])

    def read_all(self, name: str) -> npt.NDArray[Any]:
        """Copy every row."""
        spec = self.spec(name)
        out = np.empty((self.manifest.rows, *spec.shape), np.dtype(spec.dtype))
        for chunk in range(self.manifest.chunk_count):
            out[self.manifest.chunk_rows(chunk)] = self._chunk(name, chunk)
        return out

    def stats(self, layer: str) -> LayerStats:
        """Statistics of one layer's targets; `layer` is a name from `format.layer_names`."""
        mean, variance, count = (
            self._chunk(f"stats/{layer}/{name}", 0).copy() for name in ("mean", "variance", "count")
        )
        return LayerStats(mean=mean, variance=variance, count=count)

    def size_on_disk(self) -> int:
        """Bytes of all files."""
        return sum(
            (Path(folder) / name).stat().st_size
            for folder, _, names in os.walk(self.path)
            for name in names
        )

    def verify(self) -> list[str]:
        """Read every chunk and check it against its checksum and commit record; the problems."""
        problems: list[str] = []
        for chunk in range(self.manifest.chunk_count):
            damaged = [self._files[name].damage(chunk) for name in self.array_names()]
            found = [problem for problem in damaged if problem]
            # The record of a chunk with a bad file cannot match; saying so would be noise.
            problems += found or self._commit_problems(chunk)
        stats = [files for name, files in self._files.items() if name.startswith("stats/")]
        problems += [problem for files in stats if (problem := files.damage(0))]
        return problems

    def _commit_problems(self, chunk: int) -> list[str]:
        commit = self._files["commit"]
        problem = commit.damage(chunk)
        if problem:
            return [problem]
        arrays = (self._files[name] for name in self.array_names())
        if int(commit.load(chunk)[0]) == commit_record(arrays, chunk):
            return []
        rows = self.manifest.chunk_rows(chunk)
        return [
            f"commit chunk {chunk} (rows {rows.start} to {rows.stop - 1}): the record does not "
            "match the arrays, of which one was changed or swapped"
        ]

    def _load_chunk(self, name: str, chunk: int) -> npt.NDArray[Any]:
        try:
            values = self._files[name].load(chunk, check=(name, chunk) not in self._checked)
        except DamagedChunkError as error:
            raise CraftError(
                f"Cache {self.path} is damaged.", why=f"{error}.", fix=_REBUILD
            ) from error
        self._checked.add((name, chunk))
        return values
