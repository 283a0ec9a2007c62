"""Exclusive locks on bytes of an open file, which the system drops when the process dies.

POSIX systems do this with fcntl, Windows with msvcrt. Both lock bytes that the file does not have.
Windows unlocks only a range that was locked as such, so that callers must use the same ranges for
both.
"""

import os
import sys
from types import ModuleType

# `msvcrt.locking` counts bytes in a C long, which has 32 bits on Windows.
_LAST_BYTE = 2**31 - 1


def _import(name: str) -> ModuleType | None:
    try:
        return __import__(name, globals())
    except ImportError:
        return None


_fcntl = _import("fcntl")
_msvcrt = None if _fcntl else _import("msvcrt")


def lock_bytes(descriptor: int, first: int, count: int | None = None) -> None:
    """Lock `count` bytes from number `first` on, or all that follow; never waits.

    Raises:
        BlockingIOError, PermissionError: another process has locked one of them.
        OSError: the disk or the system has no such locks.
    """
    if _fcntl is not None:
        _fcntl.lockf(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB, count or 0, first)
    elif _msvcrt is not None:
        _seek_and_lock(_msvcrt, _msvcrt.LK_NBLCK, descriptor, first, count)
    else:
        raise OSError(f"Python has no file locks on {sys.platform}")


def unlock_bytes(descriptor: int, first: int, count: int | None = None) -> None:
    """Unlock a range that `lock_bytes` locked."""
    if _fcntl is not None:
        _fcntl.lockf(descriptor, _fcntl.LOCK_UN, count or 0, first)
    elif _msvcrt is not None:
        _seek_and_lock(_msvcrt, _msvcrt.LK_UNLCK, descriptor, first, count)


def _seek_and_lock(
    msvcrt: ModuleType, mode: int, descriptor: int, first: int, count: int | None
) -> None:
    os.lseek(descriptor, first, os.SEEK_SET)
    msvcrt.locking(descriptor, mode, _LAST_BYTE - first if count is None else count)
