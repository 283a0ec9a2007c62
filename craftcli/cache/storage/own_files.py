"""Which files of a cache craft writes itself; all others belong to the user and are never removed.

A cache has the metadata and chunks of its arrays, a build the file `build.json` as well. While it
writes a file, zarr calls it `<name>.<random>.partial`.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from craftcli.cache.storage.base import SETTINGS_FILE

_METADATA = "zarr.json"
_TEMPORARY = re.compile(r"[^./]*\.[0-9a-f]{8,}\.partial")
_CHUNK = re.compile(r".+/c(/\d+)+")


def foreign_files(names: Iterable[str], arrays: Iterable[str] | None) -> list[str]:
    """The names that are not files of a cache with these arrays; None if they are unknown."""
    groups = None
    if arrays is not None:
        groups = {"commit", "stats", *(array.partition("/")[0] for array in arrays)}
    return sorted(name for name in names if not _is_own(name, groups))


def foreign_in_folder(folder: Path, arrays: Iterable[str] | None) -> list[str]:
    """The files below a local folder that are not of a cache; a link is never one of its files."""
    links = [str(entry.relative_to(folder)) for entry in _entries(folder) if entry.is_symlink()]
    files = (entry for entry in _entries(folder) if not entry.is_symlink() and not entry.is_dir())
    found = foreign_files((entry.relative_to(folder).as_posix() for entry in files), arrays)
    return sorted({*links, *found})


def remove_own_files(folder: Path, arrays: Iterable[str] | None) -> None:
    """Delete a cache and its folder, `zarr.json` last: until then the rest is known as craft's.

    Raises:
        OSError: a file cannot be deleted, or one is not of the cache; that stays, with `zarr.json`.
    """
    marker = folder / _METADATA
    kept = {folder / name for name in foreign_in_folder(folder, arrays)}
    for entry in sorted(_entries(folder), reverse=True):
        if entry in kept or entry == marker:
            continue
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink()
        elif not any(file.is_relative_to(entry) for file in kept):
            entry.rmdir()
    if kept:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))
    marker.unlink(missing_ok=True)
    folder.rmdir()


def remove_temporary(folder: Path) -> None:
    """Delete the temporary files that a killed process left below a folder, and nothing else."""
    for entry in list(_entries(folder)):
        if _TEMPORARY.fullmatch(entry.name) and entry.is_file() and not entry.is_symlink():
            entry.unlink()


def _entries(folder: Path) -> Iterator[Path]:
    """Everything below a folder; links are not followed."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(place) / name


def _is_own(name: str, groups: set[str] | None) -> bool:
    top, _, below = name.partition("/")
    last = name.rpartition("/")[2]
    if not below:
        return last in (_METADATA, SETTINGS_FILE) or _TEMPORARY.fullmatch(last) is not None
    if groups is not None and top not in groups:
        return False
    is_file = last == _METADATA or _TEMPORARY.fullmatch(last) is not None
    return is_file or _CHUNK.fullmatch(name) is not None
