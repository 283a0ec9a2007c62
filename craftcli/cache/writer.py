"""Writing a cache: chunk by chunk, then statistics, then the word that it is complete."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from craftcli.cache.chunks import ArraySpec
from craftcli.cache.draft import Draft, Resumable
from craftcli.cache.format import Manifest, layer_names
from craftcli.cache.processes import Processes
from craftcli.cache.row_checks import check_arrays, check_finite, check_layout
from craftcli.cache.sites import Lock, Site, open_site
from craftcli.cache.store import (
    create_array,
    metadata_files,
    open_to_write,
    stats_chunks,
    update_manifest,
)
from craftcli.locations import Location

ALONE = Processes()


class CacheWriter:
    """Builds a cache that is none before it is complete; `sites` tells where it grows meanwhile.

    Used as a context manager: leaving it without `finish` removes what was built, or keeps it if
    chunks of a resumable build are committed; what was at `path` before stays as it was.
    """

    def __init__(
        self,
        site: Site,
        draft: Draft,
        lock: Lock,
        processes: Processes,
        *,
        overwrite: bool,
        keep: bool,
    ) -> None:
        self.path = site.path
        self.manifest = draft.manifest
        self.reused = frozenset(
            chunk for chunk in processes.own(self.manifest.chunk_count) if draft.is_done(chunk)
        )
        """Chunks of this process that an earlier build committed."""
        self._site = site
        self._draft = draft
        self._lock = lock
        self._processes = processes
        self._overwrite = overwrite
        self._keep = keep
        self._committed = set(self.reused)
        self._finished = False
        self._discarded = False
        opened = open_to_write(draft.folder, [*draft.chunks.values(), draft.commit])
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
        """Begin a cache of the arrays `<group>/<name>` at `path`; nothing is there until `finish`.

        With several `processes`, each of them does this and writes its own chunks.

        Raises:
            CraftError: `path` is taken or cannot be written, or what is to be resumed differs.
            ValueError: `arrays` does not fit the manifest.
        """
        check_arrays(manifest, arrays)
        site = open_site(path)
        draft = Draft(
            folder=site.folder,
            manifest=replace(manifest, complete=False),
            arrays=dict(sorted(arrays.items())),
            tasks=tasks,
            settings=resumable.settings if resumable else None,
        )
        lock = site.lock(processes)
        try:
            if processes.is_first:
                lock.acquire()
                resume = resumable is not None and resumable.resume
                with draft.folder.guard(draft.total_bytes):
                    _prepare(draft, site, overwrite=overwrite, resume=resume)
                lock.admit()
            processes.wait()
            if not processes.is_first:
                lock.join()
                draft.check_same()
            # From here on everyone holds the lock, so that nobody writes into a later build.
            processes.wait()
            keep = resumable is not None
            return cls(site, draft, lock, processes, overwrite=overwrite, keep=keep)
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
        # While other processes may still be writing, a folder cannot be removed from under them.
        useless = self._processes.alone and not (self._keep and self._committed)
        if not self._finished and self._processes.is_first and (self._discarded or useless):
            self._site.abandon()
        self._lock.release(done=self._finished or self._discarded)

    def write_chunk(self, chunk: int, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write the rows of one chunk to every array, then the chunk's commit record.

        Raises:
            CraftError: the disk is full, or a valid row has a hidden state that is not finite.
            ValueError: an array is missing, unknown, or of another shape or dtype.
        """
        where = self.manifest.chunk_rows(chunk)
        if chunk in self._committed:
            raise ValueError(f"chunk {chunk} is already committed")
        if chunk not in self._processes.own(self.manifest.chunk_count):
            raise ValueError(f"chunk {chunk} belongs to another process")
        draft = self._draft
        check_layout(draft.arrays, where.stop - where.start, len(draft.tasks), rows)
        check_finite(self.manifest, where.start, rows)
        with draft.folder.guard(draft.total_bytes):
            draft.write(self._arrays, where, rows)
            draft.folder.persist(chunks.key(chunk) for chunks in draft.chunks.values())
            self._commit[chunk] = draft.record(chunk)
            draft.folder.persist([draft.commit.key(chunk)])
        self._committed.add(chunk)

    def read_all(self, name: str) -> npt.NDArray[Any]:
        """All rows of an array, once every process has written its chunks."""
        return self._draft.read_all(name)

    def discard(self) -> None:
        """Keep nothing, though there are committed chunks: they are of no use to anybody."""
        self._processes.wait()
        self._discarded = True

    def finish(self) -> None:
        """Wait for every process; the first adds the statistics and moves the cache to its place.

        Raises:
            CraftError: the disk is full, or the place was taken meanwhile.
            ValueError: chunks are missing.
        """
        own = self._processes.own(self.manifest.chunk_count)
        self._require(len(own) - len(self._committed))
        self._processes.wait()
        if self._processes.is_first:
            self._complete()
        self._finished = True

    def _complete(self) -> None:
        draft, chunks = self._draft, range(self.manifest.chunk_count)
        of_others = (chunk for chunk in chunks if chunk not in self._committed)
        self._require(sum(not draft.is_sealed(chunk) for chunk in of_others))
        with draft.folder.guard(draft.total_bytes):
            stats = self._write_stats()
            draft.folder.persist(metadata_files(stats))
            draft.strip()
            # Last, because from now on a cache that is in its place counts as one.
            self.manifest = replace(self.manifest, complete=True)
            update_manifest(self._group, self.manifest)
            draft.folder.persist(metadata_files([]))
            self._site.publish(overwrite=self._overwrite)

    def _require(self, missing: int) -> None:
        if missing:
            raise ValueError(f"{missing} of {self.manifest.chunk_count} chunks are not written")

    def _write_stats(self) -> list[str]:
        """Write the statistics of every layer; the names of the arrays."""
        written: list[str] = []
        for layer in layer_names(self.manifest) if "hidden" in self.manifest.kinds else []:
            result = self._draft.layer_stats(layer)
            for entry, chunks in stats_chunks(self._draft.folder, self.manifest, layer).items():
                create_array(self._group, chunks)[:] = getattr(result, entry)
                self._draft.folder.persist([chunks.key(0)])
                written.append(chunks.name)
        return written


def _prepare(draft: Draft, site: Site, *, overwrite: bool, resume: bool) -> None:
    """Have the folder of the draft there, with its arrays and maybe with committed chunks."""
    if site.prepare(overwrite=overwrite, resume=resume):
        draft.check_same()
        draft.clean()
        return
    try:
        draft.begin()
    except BaseException:
        site.abandon()
        raise
