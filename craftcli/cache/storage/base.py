"""What a cache needs from its storage: files while it is read, a destination while it is built.

`local_*` implements this for a folder on a disk, `remote_*` for an object store. What is decided in
the same way for both is here: when an interrupted build can be resumed, and how a destination
is refused.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from craftcli.cache.storage.chunks import ArraySpec, Chunks
from craftcli.distributed import Processes
from craftcli.errors import CraftError
from craftcli.locations import Location

SETTINGS_FILE = "build.json"
"""File of an unfinished cache: the settings that change its bytes and are not in the manifest."""
NOT_RESUMABLE = b"null"
"""Contents of that file when the build cannot be resumed, as for `craft cache merge`."""


class UnreachableStoreError(CraftError):
    """The object store does not answer, or refuses access."""


class CacheFolder(Protocol):
    """The files of a cache by name; a name has slashes on every system."""

    @property
    def path(self) -> Location:
        """Where the folder is."""
        ...

    @property
    def store(self) -> Any:
        """What zarr opens."""
        ...

    def chunks(
        self, name: str, rows: int, chunk_rows: int, spec: ArraySpec, *, packed: bool = False
    ) -> Chunks:
        """The chunks of an array as craft writes them: raw rows or packed ones, and a crc32c."""
        ...

    def read(self, name: str) -> bytes | None:
        """Read a file; None if there is none."""
        ...

    def file_size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file, or replace it."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        ...

    def remove_tree(self, name: str) -> None:
        """Remove everything below a name."""
        ...

    def remove_temporary_files(self) -> None:
        """Remove the temporary files of a killed process."""
        ...

    def make_durable(self, names: Iterable[str]) -> None:
        """Return once these files would survive a loss of power."""
        ...

    def explain_errors(self, need: int = 0) -> AbstractContextManager[None]:
        """Turn the errors of the storage into a CraftError; `need` is the cache's size in bytes."""
        ...

    def version_mark(self) -> object:
        """A value that changes when another cache takes the place of this one."""
        ...

    def size(self) -> int:
        """Bytes of all files."""
        ...

    def modified(self) -> datetime:
        """When the cache was last changed."""
        ...


class BuildLock(Protocol):
    """Allows one build of a cache at a time, by one or several processes."""

    def acquire(self) -> None:
        """Take the lock; the first process does this before it changes anything."""
        ...

    def admit(self) -> None:
        """Let the other processes of this build join."""
        ...

    def join(self) -> None:
        """Join the build of the first process, which holds the lock."""
        ...

    def release(self, *, done: bool = False) -> None:
        """Release the lock; `done` means that no process of this build writes any more."""
        ...


@dataclass(frozen=True, kw_only=True)
class InterruptedBuild:
    """What an interrupted build left, or what a running one has written so far."""

    folder: Location
    committed: int
    """Chunks with a commit record."""
    chunks: int
    """Chunks of the whole cache."""

    def __str__(self) -> str:
        return f"{self.committed} of {self.chunks} chunks in {self.folder}"


class Destination(Protocol):
    """Where a cache goes: checked before the build, filled during it, complete after it."""

    @property
    def path(self) -> Location:
        """Where the cache goes."""
        ...

    @property
    def folder(self) -> CacheFolder:
        """Where it is built."""
        ...

    def lock(self, processes: Processes) -> BuildLock:
        """The lock that keeps other builds out; not taken yet."""
        ...

    def check(self, *, overwrite: bool, resume: bool) -> None:
        """Refuse early what `prepare` would refuse after the policy was loaded."""
        ...

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a path that holds something that must not be replaced."""
        ...

    def interrupted_build(self) -> InterruptedBuild | None:
        """The interrupted build that can be resumed, if there is one."""
        ...

    def prepare(self, *, overwrite: bool, resume: bool) -> bool:
        """Create the build folder, or reuse a resumable one; True if it was reused."""
        ...

    def publish(self, *, overwrite: bool) -> None:
        """Put the complete cache at its path."""
        ...

    def abandon(self) -> None:
        """Remove what was built; errors are dropped."""
        ...


def find_interrupted(
    folder: Location, manifest: Any, records: int, settings: bytes | None
) -> InterruptedBuild | None:
    """The resumable build in a folder with this manifest and number of commit records, if any.

    `settings` is the content of its SETTINGS_FILE; the file is removed once all rows are written.
    """
    try:
        chunks = -(-manifest["rows"] // manifest["rows_per_chunk"])
    except (TypeError, KeyError, ArithmeticError):
        return None
    if not records or settings == NOT_RESUMABLE:
        return None
    return InterruptedBuild(folder=folder, committed=records, chunks=chunks)


def not_a_cache_error(path: Location) -> CraftError:
    """The error for a path that holds something other than a cache."""
    return CraftError(
        f"Refusing to overwrite {path}: it is not a craft cache.",
        why="craft replaces nothing but its own caches.",
        fix="choose another path, or move what is there away.",
    )


def already_exists_error(path: Location) -> CraftError:
    """The error for a path that holds a cache."""
    return CraftError(
        f"{path} already exists.",
        why="a cache is only replaced with --overwrite.",
        fix="pass --overwrite, or choose another path.",
    )


def half_built_error(path: Location, found: InterruptedBuild) -> CraftError:
    """The error for a path at which committed chunks would be lost."""
    return CraftError(
        f"{path} is half-built.",
        why=f"a build that was interrupted, or is still running, committed {found}.",
        fix="continue it with craft cache build --resume, or replace it with --overwrite.",
    )
