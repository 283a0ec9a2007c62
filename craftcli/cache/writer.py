"""Writing a cache: chunk by chunk beside its place, then statistics, then the move."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from craftcli.cache.chunks import ArraySpec, commit_record
from craftcli.cache.dtypes import decode, is_finite
from craftcli.cache.format import Manifest, layer_names
from craftcli.cache.places import (
    check_destination,
    disk_full,
    make_partial,
    move_into_place,
    sync,
    try_remove,
)
from craftcli.cache.stats import LayerStats, Moments
from craftcli.cache.store import (
    commit_files,
    create_array,
    create_group,
    metadata_files,
    required_arrays,
    row_files,
    stats_files,
    update_manifest,
)
from craftcli.errors import CraftError


class CacheWriter:
    """Builds a cache beside its final place, and moves it there when it is complete.

    Used as a context manager: leaving it without `finish` removes what was built, and whatever was
    at `path` before stays as it was.
    """

    def __init__(
        self,
        path: Path,
        partial: Path,
        manifest: Manifest,
        arrays: Mapping[str, ArraySpec],
        tasks: Sequence[str],
        *,
        overwrite: bool,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._overwrite = overwrite
        self._need = _total_bytes(manifest, arrays)
        self._task_count = len(tasks)
        self._partial = partial
        self._committed: set[int] = set()
        self._finished = False
        specs = dict(sorted(arrays.items()))
        self._files = row_files(partial, manifest, specs)
        self._commit_files = commit_files(partial, manifest)
        self._group = create_group(partial, manifest, specs, tasks)
        self._arrays = {
            name: create_array(self._group, files) for name, files in self._files.items()
        }
        self._commit = create_array(self._group, self._commit_files)

    @classmethod
    def create(
        cls,
        path: Path,
        manifest: Manifest,
        arrays: Mapping[str, ArraySpec],
        *,
        tasks: Sequence[str],
        overwrite: bool,
    ) -> Self:
        """Begin a cache of the arrays `<group>/<name>` at `path`; nothing is there until `finish`.

        Raises:
            CraftError: `path` is taken or cannot be written.
            ValueError: `arrays` does not fit the manifest.
        """
        _check_arrays(manifest, arrays)
        # A link is followed, so that the replacement lands on the disk the link points to.
        path = path.resolve() if path.is_symlink() else path.absolute()
        partial = make_partial(path, overwrite=overwrite)
        manifest = replace(manifest, complete=False)
        try:
            with disk_full(path, _total_bytes(manifest, arrays)):
                return cls(path, partial, manifest, arrays, tasks, overwrite=overwrite)
        except BaseException:
            try_remove(partial)
            raise

    def __repr__(self) -> str:
        done = f"{len(self._committed)}/{self.manifest.chunk_count}"
        return f"CacheWriter({str(self.path)!r}, chunks={done}, finished={self._finished})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._finished:
            try_remove(self._partial)

    def write_chunk(self, chunk: int, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write the rows of one chunk to every array, then the chunk's commit record.

        Raises:
            CraftError: the disk is full, or a valid row has a hidden state that is not finite.
            ValueError: an array is missing, unknown, or of another shape or dtype.
        """
        where = self.manifest.chunk_rows(chunk)
        if chunk in self._committed:
            raise ValueError(f"chunk {chunk} is already committed")
        self._check_layout(where, rows)
        self._check_finite(where, rows)
        with disk_full(self.path, self._need):
            for name, array in self._arrays.items():
                array[where] = rows[name]
            sync(self._partial, [files.file(chunk) for files in self._files.values()])
            self._commit[chunk] = commit_record(self._files.values(), chunk)
            sync(self._partial, [self._commit_files.file(chunk)])
        self._committed.add(chunk)

    def finish(self) -> None:
        """Add the statistics, mark the cache complete and move it to its place."""
        missing = self.manifest.chunk_count - len(self._committed)
        if missing:
            raise ValueError(f"{missing} of {self.manifest.chunk_count} chunks are not written")
        with disk_full(self.path, self._need):
            stats = self._write_stats()
            self.manifest = replace(self.manifest, complete=True)
            update_manifest(self._group, self.manifest)
            sync(self._partial, metadata_files(self._partial, [*self._files, "commit", *stats]))
        check_destination(self.path, overwrite=self._overwrite)
        move_into_place(self._partial, self.path)
        self._finished = True

    def _check_layout(self, where: slice, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        if rows.keys() != self._files.keys():
            wrong = sorted(rows.keys() ^ self._files.keys())
            raise ValueError(f"arrays missing or unknown: {', '.join(wrong)}")
        for name, files in self._files.items():
            shape = (where.stop - where.start, *files.spec.shape)
            if rows[name].shape != shape or rows[name].dtype != np.dtype(files.spec.dtype):
                got = f"{rows[name].dtype} {rows[name].shape}"
                raise ValueError(f"{name} must be {files.spec.dtype} {shape}, got {got}")
        tasks = rows["index/task"][rows["valid"]]
        if ((tasks < 0) | (tasks >= self._task_count)).any():
            raise ValueError(f"index/task goes beyond the {self._task_count} tasks")

    def _check_finite(self, where: slice, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        if "hidden" not in self.manifest.kinds:
            return
        targets = rows["hidden_mask"] & rows["valid"][:, None]
        for layer in layer_names(self.manifest):
            finite = is_finite(rows[f"hidden/{layer}"], self.manifest.dtype).all(axis=2)
            bad = np.flatnonzero((targets & ~finite).any(axis=1))
            if bad.size:
                raise CraftError(
                    "The teacher's hidden states are not finite.",
                    why=f"row {where.start + bad[0]} of layer {layer} has NaN or infinity.",
                    fix="run the teacher in a wider dtype, or leave such samples out.",
                )

    def _write_stats(self) -> list[str]:
        """Write the statistics of every layer; the names of the arrays."""
        written: list[str] = []
        for layer in layer_names(self.manifest) if "hidden" in self.manifest.kinds else []:
            result = self._layer_stats(layer)
            for entry, files in stats_files(self._partial, self.manifest, layer).items():
                create_array(self._group, files)[:] = getattr(result, entry)
                sync(self._partial, [files.file(0)])
                written.append(files.name)
        return written

    def _layer_stats(self, layer: str) -> LayerStats:
        """Reads the layer back, which also proves that what was written can be read."""
        hidden, mask, valid = (
            self._files[name] for name in (f"hidden/{layer}", "hidden_mask", "valid")
        )
        moments = Moments(self.manifest.vectors, self.manifest.dim)
        for chunk in range(self.manifest.chunk_count):
            targets = mask.load(chunk) & valid.load(chunk)[:, None]
            moments.update(decode(hidden.load(chunk), self.manifest.dtype), targets)
        return moments.result()


def _total_bytes(manifest: Manifest, arrays: Mapping[str, ArraySpec]) -> int:
    return manifest.rows * sum(spec.row_bytes for spec in arrays.values())


def _check_arrays(manifest: Manifest, arrays: Mapping[str, ArraySpec]) -> None:
    required = required_arrays(manifest)
    problems = [
        f"{name} must be {spec}, got {arrays.get(name)}"
        for name, spec in required.items()
        if arrays.get(name) != spec
    ]
    for name in arrays:
        if name == "commit" or name.startswith("stats/"):
            problems.append(f"{name} is a name craft writes itself")
        if name not in required and name.startswith(("hidden", "index/")):
            problems.append(f"{name} is not in the manifest")
        if any(part in ("", ".", "..") for part in name.split("/")):
            problems.append(f"{name!r} is no array name")
    if problems:
        raise ValueError("; ".join(problems))
