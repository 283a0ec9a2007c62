"""What differs between operating systems, chosen here and nowhere else.

    file_locks    locks on bytes of a file, dropped by the system when a process dies
    file_mapping  files mapped into memory, side by side where the system can do that
    libraries     whether the system has a shared library
    memory        how much memory is free, and the most that this process used

No other module imports fcntl, msvcrt or resource. `file_mapping` imports numpy, so that names are
imported when they are first used.
"""

from typing import TYPE_CHECKING

from craftcli.lazy_names import lazy_names

if TYPE_CHECKING:
    from craftcli.system.file_locks import lock_bytes, unlock_bytes
    from craftcli.system.file_mapping import MAX_MAPPINGS, SIDE_BY_SIDE, MappedFiles, map_file
    from craftcli.system.memory import free_bytes, peak_bytes, reset_peak

__getattr__ = lazy_names(
    __name__,
    {
        "MAX_MAPPINGS": "file_mapping",
        "SIDE_BY_SIDE": "file_mapping",
        "MappedFiles": "file_mapping",
        "free_bytes": "memory",
        "lock_bytes": "file_locks",
        "map_file": "file_mapping",
        "peak_bytes": "memory",
        "reset_peak": "memory",
        "unlock_bytes": "file_locks",
    },
)

__all__ = [
    "MAX_MAPPINGS",
    "SIDE_BY_SIDE",
    "MappedFiles",
    "free_bytes",
    "lock_bytes",
    "map_file",
    "peak_bytes",
    "reset_peak",
    "unlock_bytes",
]
