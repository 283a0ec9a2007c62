"""One build at a time: a lock beside the cache that ends with the processes that hold it.

`<path>.lock` is an empty file, of which every process of a build locks the byte of its rank. A new
build first locks all bytes, so that it waits for no one and meets no process that still writes,
even if the first one was killed. The kernel drops the locks of a process that dies.
"""

import fcntl
import os
from pathlib import Path

from craftcli.cache.processes import Processes
from craftcli.errors import CraftError

# The kernel does not set a process against itself, and closing the file twice would unlock it.
_held_here: set[Path] = set()


class BuildLock:
    """The lock of one process on the cache at a path."""

    def __init__(self, path: Path, processes: Processes) -> None:
        self._cache = path
        self._processes = processes
        # One spelling, so that two ways to the same folder meet.
        self._file = path.parent.resolve() / f"{path.name}.lock"
        self._descriptor: int | None = None
        self._shared = False

    def __repr__(self) -> str:
        return f"BuildLock({str(self._file)!r}, held={self._descriptor is not None})"

    def acquire(self) -> None:
        """Keep every other build out; for the first process, before it touches anything.

        Raises:
            CraftError: another build is at it, or the folder cannot be written.
        """
        if self._file in _held_here:
            raise self._taken()
        while True:
            descriptor = self._open(os.O_RDWR | os.O_CREAT)
            self._lock(descriptor, length=0, start=0)
            # A build that just ended may have removed the file between the two calls.
            if self._is_current(descriptor):
                break
            os.close(descriptor)
        self._descriptor = descriptor
        _held_here.add(self._file)

    def admit(self) -> None:
        """Let the other processes of this build take their bytes."""
        if self._descriptor is not None and not self._processes.alone:
            self._shared = True
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 0, 1)

    def join(self) -> None:
        """Take this process's byte of the lock that the first process holds."""
        descriptor = self._open(os.O_RDWR)
        self._lock(descriptor, length=1, start=self._processes.rank)
        self._descriptor = descriptor

    def release(self, *, done: bool = False) -> None:
        """Let go; `done` says that no process of this build writes any more."""
        if self._descriptor is None:
            return
        if self._processes.is_first and (done or not self._shared):
            # Before the lock goes, so that nobody can hold a file that is about to vanish.
            self._file.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None
        _held_here.discard(self._file)

    def _open(self, flags: int) -> int:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._file, flags, 0o666)
        except OSError as error:
            raise CraftError(
                f"Cannot write {self._cache}.",
                why=f"opening {self._file} failed: {error.strerror or error}.",
                fix="choose a folder that you may write to.",
            ) from error

    def _lock(self, descriptor: int, *, length: int, start: int) -> None:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except (BlockingIOError, PermissionError) as error:
            os.close(descriptor)
            raise self._taken() from error
        except OSError as error:
            os.close(descriptor)
            raise CraftError(
                f"Cannot lock {self._cache}.",
                why=f"locking {self._file} failed: {error.strerror or error}.",
                fix="build on a disk that knows file locks, and move the cache.",
            ) from error

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._file))
        except FileNotFoundError:
            return False

    def _taken(self) -> CraftError:
        return CraftError(
            f"Another build into {self._cache} is running.",
            why=f"a process holds {self._file}.",
            fix="wait until it ends, or choose another path.",
        )
