"""Writes a cache: chunk by chunk, then the statistics, then `complete` in the manifest.

`CacheWriter.write_chunk` commits a chunk: rows, fsync, commit record, fsync. A chunk is committed
when its record matches the checksums of all arrays (`unfinished`). `storage.local_folder` chooses
the files and folders to fsync, and `sync_path` of `craftcli.whole_files` does it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from craftcli.cache.format import Manifest, layer_names, version_of
from craftcli.cache.storage.base import BuildLock, Destination
from craftcli.cache.storage.by_location import open_destination
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.zarr_layout import (
    create_array,
    metadata_files,
    open_to_write,
    stats_chunks,
    update_manifest,
    wait_for_writes,
)
from craftcli.cache.writing.checks import check_arrays, check_finite, check_layout
from craftcli.cache.writing.unfinished import Resumable, UnfinishedCache
from craftcli.distributed import Processes
from craftcli.locations import Location

ALONE = Processes()


class CacheWriter:
    """Builds a cache, which appears at its path when it is complete.

    Used as a context manager. Leaving it without `finish` removes what was built, or keeps it if
    the build is resumable and has committed chunks. A cache that was at the path before stays.
    """

    def __init__(
        self,
        destination: Destination,
        unfinished: UnfinishedCache,
        lock: BuildLock,
        processes: Processes,
        *,
        overwrite: bool,
        keep: bool,
    ) -> None:
        self.path = destination.path
        self.manifest = unfinished.manifest
        self.reused = frozenset(
            chunk
            for chunk in processes.own(self.manifest.chunk_count)
            if unfinished.is_intact(chunk)
        )
        """Chunks of this process that an earlier, interrupted build committed."""
        self._destination = destination
        self._unfinished = unfinished
        self._lock = lock
        self._processes = processes
        self._overwrite = overwrite
        self._keep = keep
        self._committed = set(self.reused)
        self._finished = False
        self._discarded = False
        opened = open_to_write(unfinished.folder, [*unfinished.chunks.values(), unfinished.records])
        self._group, self._arrays = opened
        self._commit = self._arrays.pop("commit")

    @classmethod
    def create(
        cls,
        path: str | Location,
        manifest: Manifest,
        arrays: Mapping[str, ArraySpec],
        *,
        tasks: Sequence[str],
        overwrite: bool,
        resumable: Resumable | None = None,
        processes: Processes = ALONE,
    ) -> Self:
        """Start a cache of the arrays `<group>/<name>` at `path`; nothing is there until `finish`.

        With several `processes`, each of them calls this and writes its own chunks.

        Raises:
            CraftError: `path` is taken or cannot be written, or the build to resume differs.
            ValueError: `arrays` does not fit the manifest.
        """
        check_arrays(manifest, arrays)
        destination = open_destination(path)
        unfinished = UnfinishedCache(
            folder=destination.folder,
            manifest=replace(
                manifest,
                format_version=version_of(manifest),
                complete=False,
                stats_digests=None,
            ),
            arrays=dict(sorted(arrays.items())),
            tasks=tasks,
            settings=resumable.settings if resumable else None,
        )
        lock = destination.lock(processes)
        try:
            if processes.is_first:
                lock.acquire()
                resume = resumable is not None and resumable.resume
                with unfinished.folder.explain_errors(unfinished.total_bytes):
                    _prepare(unfinished, destination, overwrite=overwrite, resume=resume)
                lock.admit()
            processes.wait()
            if not processes.is_first:
                lock.join()
                unfinished.check_same()
            # From here on every process holds the lock, so that none writes into a later build.
            processes.wait()
            keep = resumable is not None
            return cls(destination, unfinished, lock, processes, overwrite=overwrite, keep=keep)
        except BaseException:
            lock.release()
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
        # The folder is not removed while other processes may still be writing to it.
        useless = self._processes.alone and not (self._keep and self._committed)
        if not self._finished and self._processes.is_first and (self._discarded or useless):
            wait_for_writes()
            self._destination.abandon()
        self._lock.release(done=self._finished or self._discarded)

    def write_chunk(self, chunk: int, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        """Commit one chunk: its rows in every array, then its commit record, each on disk.

        Raises:
            CraftError: the disk is full, or a valid row has a hidden state that is not finite.
            ValueError: an array is missing, unknown, or of another shape or dtype.
        """
        where = self.manifest.chunk_rows(chunk)
        if chunk in self._committed:
            raise ValueError(f"chunk {chunk} is already committed")
        if chunk not in self._processes.own(self.manifest.chunk_count):
            raise ValueError(f"chunk {chunk} belongs to another process")
        unfinished = self._unfinished
        check_layout(unfinished.arrays, where.stop - where.start, len(unfinished.tasks), rows)
        check_finite(self.manifest, where.start, rows)
        with unfinished.folder.explain_errors(unfinished.total_bytes):
            unfinished.write(self._arrays, chunk, rows)
            unfinished.folder.make_durable(
                chunks.key(chunk) for chunks in unfinished.chunks.values()
            )
            self._commit[chunk] = unfinished.commit_record(chunk)
            unfinished.folder.make_durable([unfinished.records.key(chunk)])
        self._committed.add(chunk)

    def read_all(self, name: str) -> npt.NDArray[Any]:
        """All rows of an array, once every process has written its chunks."""
        return self._unfinished.read_all(name)

    def discard(self) -> None:
        """Remove even committed chunks when the context ends, because they are useless."""
        self._processes.wait()
        self._discarded = True

    def finish(self) -> None:
        """Wait for every process; the first adds the statistics and moves the cache to its path.

        Raises:
            CraftError: the disk is full, or the path was taken meanwhile.
            ValueError: chunks are missing.
        """
        own = self._processes.own(self.manifest.chunk_count)
        self._require_none(len(own) - len(self._committed))
        self._processes.wait()
        if self._processes.is_first:
            self._complete()
        self._finished = True

    def _complete(self) -> None:
        unfinished, chunks = self._unfinished, range(self.manifest.chunk_count)
        of_others = (chunk for chunk in chunks if chunk not in self._committed)
        self._require_none(sum(not unfinished.is_committed(chunk) for chunk in of_others))
        with unfinished.folder.explain_errors(unfinished.total_bytes):
            digests = self._write_stats()
            unfinished.remove_settings()
            # Last, because from now on the cache counts as complete.
            self.manifest = replace(self.manifest, complete=True, stats_digests=digests or None)
            update_manifest(self._group, self.manifest)
            unfinished.folder.make_durable(metadata_files([]))
            self._destination.publish(overwrite=self._overwrite)

    def _require_none(self, missing: int) -> None:
        if missing:
            raise ValueError(f"{missing} of {self.manifest.chunk_count} chunks are not written")

    def _write_stats(self) -> dict[str, str]:
        """Write the statistics of every layer; return their digests."""
        unfinished, written = self._unfinished, list[str]()
        folder = unfinished.folder
        digests = {}
        for layer in layer_names(self.manifest) if "hidden" in self.manifest.kinds else []:
            result = unfinished.layer_stats(layer)
            digests[layer] = result.digest()
            for entry, chunks in stats_chunks(folder, self.manifest, layer).items():
                array, values = create_array(self._group, chunks), getattr(result, entry)
                unfinished.write_rows(array, chunks, slice(0, chunks.rows), values)
                folder.make_durable([chunks.key(0)])
                written.append(chunks.name)
        folder.make_durable(metadata_files(written))
        return digests


def _prepare(
    unfinished: UnfinishedCache, destination: Destination, *, overwrite: bool, resume: bool
) -> None:
    """Create the unfinished cache, or check and reuse one with committed chunks."""
    if destination.prepare(overwrite=overwrite, resume=resume):
        unfinished.check_same()
        unfinished.remove_incomplete()
        return
    try:
        unfinished.create()
    except BaseException:
        wait_for_writes()
        destination.abandon()
        raise
