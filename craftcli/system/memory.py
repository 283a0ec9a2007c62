"""How much memory is free, and the most that this process used at once."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
# Linux: writing 5 sets the peak of the process back to what it uses now.
_RESET = Path("/proc/self/clear_refs")
# A container sees its own limit and use here: control groups version 2, then version 1.
LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def free_bytes() -> int:
    """Memory that this process may take without harm to others; 0 if unknown."""
    return max(0, min([_physical_bytes(), *_group_bytes()]))


def peak_bytes() -> int:
    """The most memory that this process used so far; 0 if unknown."""
    if STATUS.is_file():
        (line,) = (text for text in STATUS.read_text("ascii").splitlines() if "VmHWM" in text)
        return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, other systems kibibytes.
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak() -> None:
    """Make `peak_bytes` count from here on, where the system can."""
    if _RESET.exists():
        _RESET.write_text("5", encoding="ascii")


def _physical_bytes() -> int:
    """What the machine has left."""
    try:
        lines = MEMINFO.read_text("ascii").splitlines()
        (line,) = (line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        # Other systems report only the memory of the machine; half of it is a cautious guess.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError, AttributeError):
        return 0


def _group_bytes() -> Iterator[int]:
    """What the control group of a container has left, if it has a limit."""
    for limit, used in LIMITS:
        # No such group, or its limit is the word "max".
        with contextlib.suppress(OSError, ValueError):
            yield int(limit.read_text("ascii")) - int(used.read_text("ascii"))
