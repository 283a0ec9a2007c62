"""An unfinished cache: begun, found again, and which of its chunks are done.

It is a cache that lacks chunks and statistics, with `build.json` on top: the settings that are not
in the manifest and still change the bytes. That file goes when the cache is finished.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from craftcli.cache.chunks import ArraySpec, Chunks, DamagedChunkError, seal_of
from craftcli.cache.dtypes import decode
from craftcli.cache.fetching import is_fetched, map_over
from craftcli.cache.folders import Folder
from craftcli.cache.format import Manifest
from craftcli.cache.places import NOT_RESUMABLE, SETTINGS
from craftcli.cache.stats import LayerStats, Moments
from craftcli.cache.store import (
    commit_chunks,
    create_array,
    create_group,
    metadata_files,
    read_attributes,
    row_chunks,
)
from craftcli.errors import CraftError


@dataclass(frozen=True, kw_only=True)
class Resumable:
    """That a build can be done again chunk by chunk, so that an interrupted one is worth keeping.

    Every chunk must be a pure function of the manifest and of `settings`.
    """

    resume: bool
    """Whether to go on with the committed chunks that are there; else they must not be there."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the bytes depend on beside the manifest, as JSON values."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a build is to write, and the folder that it grows in."""

    folder: Folder
    manifest: Manifest
    arrays: Mapping[str, ArraySpec]
    """The arrays with a row axis, by sorted name."""
    tasks: Sequence[str]
    settings: Mapping[str, Any] | None = None
    """What else the bytes depend on, as JSON values; None if nobody can go on with the build."""

    @cached_property
    def chunks(self) -> dict[str, Chunks]:
        """The chunks of the rows."""
        return row_chunks(self.folder, self.manifest, self.arrays)

    @cached_property
    def commit(self) -> Chunks:
        """The chunks of the commit records."""
        return commit_chunks(self.folder, self.manifest)

    @property
    def total_bytes(self) -> int:
        """Size of all rows."""
        return self.manifest.rows * sum(spec.row_bytes for spec in self.arrays.values())

    def begin(self) -> None:
        """Make the group and its arrays, without rows, in the empty folder."""
        group = create_group(self.folder, self.manifest, self.arrays, self.tasks)
        for chunks in (*self.chunks.values(), self.commit):
            create_array(group, chunks)
        settings = NOT_RESUMABLE if self.settings is None else json.dumps(self.settings).encode()
        self.folder.write(SETTINGS, settings)
        self.folder.persist([SETTINGS, *metadata_files([*self.chunks, "commit"])])

    def check_same(self) -> None:
        """Refuse to go on with what another build began.

        Raises:
            CraftError: the folder was begun for other rows, a teacher or settings than these.
        """
        found = read_attributes(self.folder)
        if found is None:
            raise CraftError(
                f"Cannot go on with {self.folder}.",
                why="there is no build that this process can read.",
                fix="let all processes of a build see the same disk.",
            )
        differing = list(self._differences(found))
        if differing:
            raise CraftError(
                f"Cannot resume the build in {self.folder}.",
                why=f"it was begun with other values of {', '.join(differing)}.",
                fix="give the same settings again, or start anew with --overwrite.",
            )

    def clean(self) -> None:
        """Remove what a killed process left between chunks; no other process may be writing."""
        self.folder.sweep()
        # They are made of all rows, at the end.
        self.folder.remove_tree("stats")

    def is_done(self, chunk: int) -> bool:
        """Whether a chunk of all arrays is whole, and is what its record was made of."""
        damaged = self._of_all(lambda chunks: chunks.damage(chunk))
        return not any(damaged) and self.is_sealed(chunk)

    def is_sealed(self, chunk: int) -> bool:
        """Whether a chunk's record is there and fits its checksums; rows are not read."""
        try:
            record = int(self.commit.load(chunk)[0])
            return record == self.record(chunk)
        except (DamagedChunkError, OSError):
            return False

    def write(
        self, arrays: Mapping[str, Any], where: slice, rows: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Write rows to every array, which zarr opened."""

        def write_one(chunks: Chunks) -> None:
            arrays[chunks.name][where] = rows[chunks.name]

        self._of_all(write_one)

    def record(self, chunk: int) -> int:
        """The commit record of a chunk that is written."""
        return seal_of(self._of_all(lambda chunks: chunks.checksum(chunk)))

    def read_all(self, name: str) -> npt.NDArray[Any]:
        """All rows of an array, when every chunk is there."""
        chunks = range(self.manifest.chunk_count)
        return np.concatenate([self.chunks[name].load(chunk) for chunk in chunks])

    def layer_stats(self, layer: str) -> LayerStats:
        """Read a layer back, which also proves that what was written can be read."""
        moments = Moments(self.manifest.vectors, self.manifest.dim)
        for chunk in range(self.manifest.chunk_count):
            hidden, mask, valid = (
                self.chunks[name].load(chunk)
                for name in (f"hidden/{layer}", "hidden_mask", "valid")
            )
            moments.update(decode(hidden, self.manifest.dtype), mask & valid[:, None])
        return moments.result()

    def strip(self) -> None:
        """Remove what a finished cache does not have."""
        self.folder.remove(SETTINGS)

    def _of_all[R](self, work: Callable[[Chunks], R]) -> Sequence[R]:
        return map_over(work, self.chunks.values(), fetched=is_fetched(self.commit))

    def _differences(self, found: Mapping[str, Any]) -> Iterator[str]:
        wanted = _flat(
            {
                # Killed after its last step but one, a build is marked complete already.
                "craft": {**self.manifest.to_json(), "complete": None},
                "arrays": {name: spec.to_json() for name, spec in self.arrays.items()},
                "tasks": list(self.tasks),
            }
        )
        there = _flat({name: found.get(name) for name in ("craft", "arrays", "tasks")})
        if "craft.complete" in there:
            there["craft.complete"] = None
        # The file goes just before the end, when no row is left to be computed.
        settings = self.folder.read(SETTINGS)
        if settings is not None:
            there |= _flat(json.loads(settings) or {})
            wanted |= _flat(self.settings or {})
        for name in sorted(wanted.keys() | there.keys()):
            if name not in wanted or name not in there or wanted[name] != there[name]:
                yield name.removeprefix("craft.")


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """JSON values by their dotted place; what is no object stays whole."""
    if not isinstance(values, Mapping):
        return {prefix.removesuffix("."): json.loads(json.dumps(values))}
    return {
        name: value
        for key, entry in values.items()
        for name, value in _flat(entry, f"{prefix}{key}.").items()
    }
