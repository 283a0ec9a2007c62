"""How much memory is free, and files mapped into it side by side."""

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

# The same on Linux and macOS; Python does not name it.
_MAP_FIXED = 0x10
_MEMINFO = Path("/proc/meminfo")
# A container sees its own limit and use here: control groups version 2, then version 1.
_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def free_bytes() -> int:
    """Memory that this process may take without harm to others; 0 when it cannot be known."""
    return max(0, min([_physical_bytes(), *_group_bytes()]))


class Region:
    """Address space, read-only, in which files are mapped side by side and read as one.

    Python's own mmap cannot do that. It also holds a file open for as long as it lives, and a large
    cache has more chunks than the 1,024 files a process may open by default.
    """

    def __init__(self, size: int) -> None:
        # Until files are placed nothing may be read, and no memory is taken.
        self._address = _map(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        block = (ctypes.c_uint8 * size).from_address(self._address)
        # At exit the system unmaps everything, while other threads may still be reading.
        weakref.finalize(block, _libc.munmap, self._address, size).atexit = False
        self.values: npt.NDArray[np.uint8] = np.frombuffer(block, np.uint8)
        """The bytes; they stay mapped for as long as this or a view of it is alive."""
        self.values.flags.writeable = False

    def place(self, descriptor: int, offset: int, size: int) -> None:
        """Map the first bytes of a file at a multiple of the page size; it may be closed then."""
        if offset % mmap.PAGESIZE or offset < 0 or offset + size > self.values.size:
            raise ValueError(f"{size} bytes cannot be mapped at {offset} of {self.values.size}")
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _map(self._address + offset, size, mmap.PROT_READ, flags, descriptor)


def _map(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


def _physical_bytes() -> int:
    """What the machine has left."""
    try:
        lines = _MEMINFO.read_text("ascii").splitlines()
        (line,) = (line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        # Other systems tell only what they have in all; half of it is a cautious guess.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError):
        return 0


def _group_bytes() -> Iterator[int]:
    """What the control group of a container has left, if it has a limit."""
    for limit, used in _LIMITS:
        # No such group, or its limit is the word "max".
        with contextlib.suppress(OSError, ValueError):
            yield int(limit.read_text("ascii")) - int(used.read_text("ascii"))
