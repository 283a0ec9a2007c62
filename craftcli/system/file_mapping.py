"""Files mapped into memory, read-only, as arrays of bytes.

On Linux and macOS the C library's mmap puts several files side by side, so that numpy reads them as
one array, and keeps no file open: a large cache has more chunks than the 1,024 files that a process
may open by default. Elsewhere Python's own mmap maps one file at a time and keeps it open.
"""

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

# The same on Linux and macOS; Python does not name it.
_MAP_FIXED = 0x10


def _find_libc() -> Any:
    """The C library with its mmap declared; None where it has none, as on Windows."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    except (OSError, TypeError, AttributeError):
        return None
    return libc


_libc = _find_libc()

SIDE_BY_SIDE = _libc is not None
"""Whether `MappedFiles` works here."""
MAX_MAPPINGS = 32768 if SIDE_BY_SIDE else 512
"""How many files one cache may have mapped at a time.

Linux allows a process 65,530 mappings by default, and torch needs some of them. Python's own mmap
is bound by the number of open files instead.
"""


def map_file(descriptor: int, size: int) -> npt.NDArray[np.uint8]:
    """Map the first bytes of an open file, which may be closed afterwards."""
    if SIDE_BY_SIDE:
        files = MappedFiles(size)
        files.add(descriptor, 0, size)
        return files.values
    return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), np.uint8)


class MappedFiles:
    """A range of addresses in which files are mapped side by side and read as one array."""

    def __init__(self, size: int) -> None:
        # Until files are added nothing may be read, and no memory is taken.
        self._address = _map(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        block = (ctypes.c_uint8 * size).from_address(self._address)
        # At exit the system unmaps everything, while other threads may still be reading.
        weakref.finalize(block, _libc.munmap, self._address, size).atexit = False
        self.values: npt.NDArray[np.uint8] = np.frombuffer(block, np.uint8)
        """The bytes; they stay mapped for as long as this or a view of it is alive."""
        self.values.flags.writeable = False

    def add(self, descriptor: int, offset: int, size: int) -> None:
        """Map the first bytes of an open file at `offset`, a multiple of the page size.

        The file may be closed afterwards.
        """
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
