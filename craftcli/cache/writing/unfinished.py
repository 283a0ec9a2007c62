"""An unfinished cache: how it is created, resumed, and which of its chunks are committed.

It is a cache without its statistics and some chunks, and with the file `build.json`: the settings
that change the bytes and are not in the manifest. The file is removed when the cache is finished.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from craftcli.cache.dtypes import decode
from craftcli.cache.format import Manifest
from craftcli.cache.reading.prefetch import is_fetched, map_over
from craftcli.cache.stats import LayerStats, Moments
from craftcli.cache.storage.base import NOT_RESUMABLE, SETTINGS_FILE, CacheFolder
from craftcli.cache.storage.chunks import ArraySpec, Chunks, DamagedChunkError, commit_record
from craftcli.cache.storage.packed_chunks import PackedChunks
from craftcli.cache.storage.zarr_layout import (
    commit_chunks,
    create_array,
    create_group,
    metadata_files,
    read_attributes,
    row_chunks,
)
from craftcli.errors import CraftError

_PLACES = {"craft.dataset.root", "craft.teacher.source"}
"""Where teacher and data lie. Digests say what they are, and those must not differ."""


@dataclass(frozen=True, kw_only=True)
class Resumable:
    """Options of a resumable build: each chunk depends only on the manifest and `settings`."""

    resume: bool
    """Whether to keep committed chunks of an earlier build; without it, such chunks are refused."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the bytes depend on besides the manifest, as JSON values."""


@dataclass(frozen=True, kw_only=True)
class UnfinishedCache:
    """The contents that a build is to write, and the folder in which it writes them."""

    folder: CacheFolder
    manifest: Manifest
    arrays: Mapping[str, ArraySpec]
    """The arrays with a row axis, by sorted name."""
    tasks: Sequence[str]
    settings: Mapping[str, Any] | None = None
    """What else the bytes depend on, as JSON values; None if the build cannot be resumed."""

    @cached_property
    def chunks(self) -> dict[str, Chunks]:
        """The chunks of the arrays with a row axis, by array."""
        return row_chunks(self.folder, self.manifest, self.arrays)

    @cached_property
    def records(self) -> Chunks:
        """The chunks of the commit records."""
        return commit_chunks(self.folder, self.manifest)

    @property
    def total_bytes(self) -> int:
        """Size of all rows."""
        return self.manifest.rows * sum(spec.row_bytes for spec in self.arrays.values())

    def create(self) -> None:
        """Create the group and its arrays, without rows, in an empty folder."""
        group = create_group(self.folder, self.manifest, self.arrays, self.tasks)
        for chunks in (*self.chunks.values(), self.records):
            create_array(group, chunks)
        settings = NOT_RESUMABLE if self.settings is None else json.dumps(self.settings).encode()
        self.folder.write(SETTINGS_FILE, settings)
        self.folder.make_durable([SETTINGS_FILE, *metadata_files([*self.chunks, "commit"])])

    def check_same(self) -> None:
        """Refuse a folder that was created for other contents.

        Raises:
            CraftError: the folder has other rows, another teacher or other settings.
        """
        found = read_attributes(self.folder)
        if found is None:
            raise CraftError(
                f"Cannot join the build in {self.folder}.",
                why="this process finds no build there.",
                fix="let all processes of a build see the same disk.",
            )
        differing = list(self._differences(found))
        if differing:
            raise CraftError(
                f"Cannot resume the build in {self.folder}.",
                why=f"it was started with other values of {', '.join(differing)}.",
                fix="give the same settings again, or start anew with --overwrite.",
            )

    def remove_incomplete(self) -> None:
        """Remove temporary files and statistics; no other process may be writing."""
        self.folder.remove_temporary_files()
        # They are computed from all rows, at the end.
        self.folder.remove_tree("stats")

    def is_intact(self, chunk: int) -> bool:
        """Whether a chunk is committed and its rows match their checksums in all arrays."""
        damaged = self._of_all(lambda chunks: chunks.damage(chunk))
        return not any(damaged) and self.is_committed(chunk)

    def is_committed(self, chunk: int) -> bool:
        """Whether a chunk has a commit record that matches its checksums; rows are not read."""
        try:
            record = int(self.records.load(chunk)[0])
            return record == self.commit_record(chunk)
        except (DamagedChunkError, OSError):
            return False

    def write(
        self, arrays: Mapping[str, Any], chunk: int, rows: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Write the rows of a chunk to every one of zarr's arrays."""
        where = self.manifest.chunk_rows(chunk)

        def write_one(chunks: Chunks) -> None:
            self.write_rows(arrays[chunks.name], chunks, where, rows[chunks.name])

        self._of_all(write_one)

    def write_rows(self, array: Any, chunks: Chunks, where: slice, rows: npt.NDArray[Any]) -> None:
        """Write the rows `where`, which are one chunk, to zarr's array of these chunks."""
        if isinstance(chunks, PackedChunks):
            # Zarr would write the same pieces in another order.
            self.folder.write(chunks.key(where.start // chunks.chunk_rows), chunks.encode(rows))
        else:
            array[where] = rows

    def commit_record(self, chunk: int) -> int:
        """Compute the commit record of a chunk that is written."""
        return commit_record(self._of_all(lambda chunks: chunks.checksum(chunk)))

    def read_all(self, name: str) -> npt.NDArray[Any]:
        """All rows of an array, once every chunk is written."""
        chunks = range(self.manifest.chunk_count)
        return np.concatenate([self.chunks[name].load(chunk) for chunk in chunks])

    def layer_stats(self, layer: str) -> LayerStats:
        """Read a layer back and compute its statistics; this proves that it can be read."""
        moments = Moments(self.manifest.vectors, self.manifest.dim)
        for chunk in range(self.manifest.chunk_count):
            hidden, mask, valid = (
                self.chunks[name].load(chunk)
                for name in (f"hidden/{layer}", "hidden_mask", "valid")
            )
            moments.update(decode(hidden, self.manifest.dtype), mask & valid[:, None])
        return moments.result()

    def remove_settings(self) -> None:
        """Remove the file that a finished cache does not have."""
        self.folder.remove(SETTINGS_FILE)

    def _of_all[R](self, work: Callable[[Chunks], R]) -> Sequence[R]:
        return map_over(work, self.chunks.values(), fetched=is_fetched(self.records))

    def _differences(self, found: Mapping[str, Any]) -> Iterator[str]:
        """The fields that differ from those in the folder."""
        wanted = _flat(
            {
                "craft": _without_ending(self.manifest.to_json()),
                "arrays": {name: spec.to_json() for name, spec in self.arrays.items()},
                "tasks": list(self.tasks),
            }
        )
        there = _flat(
            {
                "craft": _without_ending(found.get("craft")),
                **{name: found.get(name) for name in ("arrays", "tasks")},
            }
        )
        # The file is removed just before the end, when all rows are written.
        settings = self.folder.read(SETTINGS_FILE)
        if settings is not None:
            there |= _flat(json.loads(settings) or {})
            wanted |= _flat(self.settings or {})
        for name in sorted((wanted.keys() | there.keys()) - _PLACES):
            if name not in wanted or name not in there or wanted[name] != there[name]:
                yield name.removeprefix("craft.")


def _without_ending(manifest: Any) -> Any:
    """A manifest without what the end of a build adds, which a killed build may have already."""
    if not isinstance(manifest, Mapping):
        return manifest
    return {name: v for name, v in manifest.items() if name not in ("complete", "stats_digests")}


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """JSON values by their dotted path, without nested objects."""
    if not isinstance(values, Mapping):
        return {prefix.removesuffix("."): json.loads(json.dumps(values))}
    return {
        name: value
        for key, entry in values.items()
        for name, value in _flat(entry, f"{prefix}{key}.").items()
    }
