"""One build at a time on a local disk: a lock that ends with the processes that hold it.

`.<name>.craft.lock` is an empty file beside the cache, and every process of a build locks the byte
with the number of its rank. A new build first tries to lock all bytes. That fails while any process
of an older build still writes, even if the first one was killed. The system drops the locks of a
process that dies.
"""

import contextlib
import os
import stat
from pathlib import Path

from craftcli.distributed import Processes
from craftcli.errors import CraftError
from craftcli.system.file_locks import lock_bytes, unlock_bytes

# A process does not see its own locks, and closing its file a second time would unlock it.
_held_here: set[Path] = set()


class LocalLock:
    """The lock of one process on the cache at a path."""

    def __init__(self, path: Path, processes: Processes) -> None:
        self._cache = path
        self._processes = processes
        # One spelling, so that two ways to the same folder meet.
        self._file = path.parent.resolve() / f".{path.name}.craft.lock"
        self._descriptor: int | None = None
        self._shared = False

    def __repr__(self) -> str:
        return f"LocalLock({str(self._file)!r}, held={self._descriptor is not None})"

    def acquire(self) -> None:
        """Take the lock; the first process does this before it changes anything.

        Raises:
            CraftError: another build is running, or the folder cannot be written.
        """
        if self._file in _held_here:
            raise self._taken()
        while True:
            descriptor = self._open(os.O_RDWR | os.O_CREAT)
            # Two ranges, so that `admit` can unlock the second.
            self._lock(descriptor, 0, 1)
            self._lock(descriptor, 1, None)
            # A build that just ended may have removed the file between the two calls.
            if self._is_current(descriptor):
                break
            os.close(descriptor)
        self._descriptor = descriptor
        _held_here.add(self._file)

    def admit(self) -> None:
        """Let the other processes of this build lock their bytes."""
        if self._descriptor is not None and not self._processes.alone:
            self._shared = True
            unlock_bytes(self._descriptor, 1)

    def join(self) -> None:
        """Lock this process's byte; the first process holds byte 0."""
        descriptor = self._open(os.O_RDWR)
        self._lock(descriptor, self._processes.rank, 1)
        self._descriptor = descriptor

    def release(self, *, done: bool = False) -> None:
        """Release the lock; `done` means that no process of this build writes any more."""
        if self._descriptor is None:
            return
        remove = self._processes.is_first and (done or not self._shared)
        if remove and os.name != "nt":
            # Before the lock is released, so that no other build holds a file that is then removed.
            self._file.unlink(missing_ok=True)
        os.close(self._descriptor)
        if remove and os.name == "nt":
            # Windows removes no open file: not before this, nor when the next build has opened it.
            with contextlib.suppress(OSError):
                self._file.unlink()
        self._descriptor = None
        _held_here.discard(self._file)

    def _open(self, flags: int) -> int:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Never through a link, which could point to any file of the user's.
            descriptor = os.open(self._file, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as error:
            raise CraftError(
                f"Cannot write {self._cache}.",
                why=f"opening {self._file} failed: {error.strerror or error}.",
                fix="choose a folder that you may write to.",
            ) from error
        found = os.fstat(descriptor)
        if found.st_size or not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise CraftError(
                f"Cannot lock {self._cache}.",
                why=f"{self._file} is not a lock of craft's: those are empty files.",
                fix="move it away, or choose another path.",
            )
        return descriptor

    def _lock(self, descriptor: int, first: int, count: int | None) -> None:
        try:
            lock_bytes(descriptor, first, count)
        except (BlockingIOError, PermissionError) as error:
            os.close(descriptor)
            raise self._taken() from error
        except OSError as error:
            os.close(descriptor)
            raise CraftError(
                f"Cannot lock {self._cache}.",
                why=f"locking {self._file} failed: {error.strerror or error}.",
                fix="build on a disk that supports file locks, and move the cache.",
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
