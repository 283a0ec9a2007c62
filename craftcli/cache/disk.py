"""What a build asks of the disk: that things are on it, and an error that helps when it is full."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from craftcli.errors import CraftError


@contextlib.contextmanager
def disk_full(path: Path, need: int) -> Iterator[None]:
    """Turn a full disk into an error that names the `need` of the whole cache, in bytes."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        disk = next(folder for folder in path.parents if folder.is_mount())
        raise CraftError(
            f"The disk is full, {path} was not written.",
            why=f"the cache needs {_size(need)} in all; the disk at {disk} has room for "
            f"{_size(shutil.disk_usage(path.parent).free)} more, with the unfinished build on it.",
            fix="free space, choose a path on another disk, or keep fewer samples or layers.",
        ) from error


def sync(root: Path, files: Iterable[Path]) -> None:
    """Put files and the folders that lead to them on disk."""
    folders: set[Path] = {root}
    for file in files:
        sync_one(file)
        folder = file.parent
        while folder not in folders:
            folders.add(folder)
            folder = folder.parent
    for folder in folders:
        sync_one(folder)


def sync_one(path: Path) -> None:
    """Put one file or folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e3:.1f} kB"
