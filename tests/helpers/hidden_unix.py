"""Makes this process look like Windows to craft: no fcntl, no resource, no mmap of the C library.

Only for craft's own modules: other packages have their own way of telling the systems apart.
`msvcrt` is there instead, with locks that the Unix ones stand for.
"""

import builtins
import ctypes
import errno
import fcntl
import inspect
import os
from types import ModuleType
from typing import Any

HIDDEN = ("fcntl", "resource")


def hide() -> None:
    """Hide them from now on; craft must not be imported yet."""
    _hide_modules()
    _hide_libc()


def _of_craft(names: Any) -> bool:
    return str((names or {}).get("__name__", "")).startswith("craftcli")


def _hide_modules() -> None:
    real, msvcrt = builtins.__import__, make_msvcrt()

    def refuse(name: str, names: Any = None, *others: Any, **keywords: Any) -> Any:
        if name in HIDDEN and _of_craft(names):
            raise ImportError(f"No module named {name!r}")
        if name == "msvcrt" and _of_craft(names):
            return msvcrt
        return real(name, names, *others, **keywords)

    builtins.__import__ = refuse  # type: ignore[assignment]  # it takes anything


def _caller_names() -> Any:
    """The global names of the code that called the function which calls this one."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame.f_back if frame else None
    return frame.f_globals if frame else None


def _hide_libc() -> None:
    class Library(ctypes.CDLL):
        def __init__(self, name: Any, *others: Any, **keywords: Any) -> None:
            if name is None and _of_craft(_caller_names()):
                raise TypeError("expected a string or a path, not NoneType")
            super().__init__(name, *others, **keywords)

    ctypes.CDLL = Library  # type: ignore[misc]


def make_msvcrt() -> ModuleType:
    """Windows' locks: they never wait here, and unlock only a range that was locked as such."""
    module = ModuleType("msvcrt")
    locked: set[tuple[int, int, int]] = set()

    def locking(descriptor: int, mode: int, count: int) -> None:
        if not 0 < count < 2**31:
            raise OverflowError("Python int too large to convert to C long")
        first = os.lseek(descriptor, 0, os.SEEK_CUR)
        key = (os.fstat(descriptor).st_ino, first, count)
        try:
            if mode == 2:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, count, first)
                locked.add(key)
            else:
                locked.remove(key)
                fcntl.lockf(descriptor, fcntl.LOCK_UN, count, first)
        except (OSError, KeyError):
            raise PermissionError(errno.EACCES, "Permission denied") from None

    module.__dict__.update(locking=locking, LK_NBLCK=2, LK_UNLCK=0)
    return module
