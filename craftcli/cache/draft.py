"""An unfinished cache: begun, found again, and which of its chunks are done.

It is a cache that lacks chunks and statistics, with `build.json` on top: the settings that are not
in the manifest and still change the bytes. That file goes when the cache is finished.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from craftcli.cache.chunks import ArraySpec, ChunkFiles, DamagedChunkError, commit_record
from craftcli.cache.disk import sync
from craftcli.cache.dtypes import decode
from craftcli.cache.format import Manifest
from craftcli.cache.places import read_attributes
from craftcli.cache.stats import LayerStats, Moments
from craftcli.cache.store import (
    commit_files,
    create_array,
    create_group,
    metadata_files,
    row_files,
)
from craftcli.errors import CraftError

_SETTINGS = "build.json"


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

    folder: Path
    manifest: Manifest
    arrays: Mapping[str, ArraySpec]
    """The arrays with a row axis, by sorted name."""
    tasks: Sequence[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else the bytes depend on, as JSON values."""

    @cached_property
    def files(self) -> dict[str, ChunkFiles]:
        """The chunk files of the rows."""
        return row_files(self.folder, self.manifest, self.arrays)

    @cached_property
    def commit(self) -> ChunkFiles:
        """The files of the commit records."""
        return commit_files(self.folder, self.manifest)

    @property
    def total_bytes(self) -> int:
        """Size of all rows."""
        return self.manifest.rows * sum(spec.row_bytes for spec in self.arrays.values())

    def begin(self) -> None:
        """Make the group and its arrays, without rows, in the empty folder."""
        group = create_group(self.folder, self.manifest, self.arrays, self.tasks)
        for files in (*self.files.values(), self.commit):
            create_array(group, files)
        settings = self.folder / _SETTINGS
        settings.write_text(json.dumps(self.settings), "utf-8")
        sync(self.folder, [settings, *metadata_files(self.folder, [*self.files, "commit"])])

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
        # Zarr writes a file under such a name first; statistics are made of all rows, at the end.
        for leftover in self.folder.rglob("*.partial"):
            if leftover.is_file():
                leftover.unlink()
        shutil.rmtree(self.folder / "stats", ignore_errors=True)

    def is_done(self, chunk: int) -> bool:
        """Whether all files of a chunk are whole, and are those that its record was made of."""
        damaged = any(files.damage(chunk) for files in self.files.values())
        return not damaged and self.is_sealed(chunk)

    def is_sealed(self, chunk: int) -> bool:
        """Whether a chunk's record is there and fits its files, whose rows are not read."""
        try:
            record = int(self.commit.load(chunk)[0])
            return record == commit_record(self.files.values(), chunk)
        except (DamagedChunkError, OSError):
            return False

    def read_all(self, name: str) -> npt.NDArray[Any]:
        """All rows of an array, when every chunk is there."""
        chunks = range(self.manifest.chunk_count)
        return np.concatenate([self.files[name].load(chunk) for chunk in chunks])

    def layer_stats(self, layer: str) -> LayerStats:
        """Read a layer back, which also proves that what was written can be read."""
        moments = Moments(self.manifest.vectors, self.manifest.dim)
        for chunk in range(self.manifest.chunk_count):
            hidden, mask, valid = (
                self.files[name].load(chunk) for name in (f"hidden/{layer}", "hidden_mask", "valid")
            )
            moments.update(decode(hidden, self.manifest.dtype), mask & valid[:, None])
        return moments.result()

    def strip(self) -> None:
        """Remove what a finished cache does not have."""
        (self.folder / _SETTINGS).unlink(missing_ok=True)

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
        with contextlib.suppress(FileNotFoundError):
            there |= _flat(json.loads((self.folder / _SETTINGS).read_text("utf-8")))
            wanted |= _flat(self.settings)
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
