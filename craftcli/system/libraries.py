"""Libraries of the system, by name."""

import ctypes


def has_library(name: str) -> bool:
    """Whether the system finds a shared library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
