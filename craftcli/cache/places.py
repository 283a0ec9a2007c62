"""Where a cache is built and how it gets to its place; no zarr, a cache is a folder with a mark.

A cache grows in `<path>.partial`. When it is complete, what it replaces steps aside to
`<path>.replaced`, it moves to `path`, and the old one is removed. Whenever this is interrupted, the
next build finds out what happened, and nothing that craft did not write is ever removed.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from craftcli.errors import CraftError

_BUILD = "craft cache build"


def is_craft_cache(path: Path) -> bool:
    """Whether a folder carries craft's mark, complete or not."""
    try:
        metadata = json.loads((path / "zarr.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    attributes = metadata.get("attributes") if isinstance(metadata, dict) else None
    return isinstance(attributes, dict) and isinstance(attributes.get("craft"), dict)


def check_destination(path: Path, *, overwrite: bool) -> None:
    """Refuse a path that holds something, unless it is a cache that may be replaced."""
    if not os.path.lexists(path):
        return
    if not is_craft_cache(path):
        raise CraftError(
            f"{path} exists and is not a craft cache.",
            why="craft replaces nothing but its own caches.",
            fix="choose another path, or move what is there away.",
        )
    if not overwrite:
        raise CraftError(
            f"{path} already exists.",
            why="a cache is not replaced unless you ask for it.",
            fix="pass --overwrite, or choose another path.",
        )


def missing_cache(path: Path) -> CraftError:
    """The error for a path without a folder: what is there instead, and what a build left."""
    if os.path.lexists(path):
        why = "it is not a folder." if path.exists() else "it is a link to nothing."
        return CraftError(
            f"{path} is not a craft cache.", why=why, fix=f"give what {_BUILD} wrote."
        )
    if _aside(path).exists():
        why = f"a build was killed while it replaced the cache; the old one is {_aside(path)}."
        fix = f"rename that to {path.name}, or run {_BUILD}."
    elif _partial(path).exists():
        why = f"it is only half-built: a killed or running build left {_partial(path)}."
        fix = f"wait for the build if it is running, else run {_BUILD} again."
    else:
        why, fix = "nothing is there.", f"check the path, or make one with {_BUILD}."
    return CraftError(f"No cache at {path}.", why=why, fix=fix)


def make_partial(path: Path, *, overwrite: bool) -> Path:
    """Make the empty folder to build in, after a check of `path` and of what a killed build left.

    Raises:
        CraftError: `path` is taken, something else is in the way, or the folder cannot be made.
    """
    _restore_interrupted_overwrite(path)
    check_destination(path, overwrite=overwrite)
    partial = _partial(path)
    if os.path.lexists(partial):
        _check_leftover(partial)
        _remove(partial)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise CraftError(
            f"Cannot write {path}.",
            why=f"creating {partial} failed: {error.strerror or error}.",
            fix="choose a folder that you may write to.",
        ) from error
    return partial


def move_into_place(partial: Path, path: Path) -> None:
    """Move a complete cache to `path`; what was there is removed, or brought back on failure."""
    aside = _aside(path)
    replaces = os.path.lexists(path)
    if replaces:
        path.rename(aside)
    try:
        partial.rename(path)
    except BaseException:
        if replaces:
            aside.rename(path)
        raise
    _sync_one(path.parent)
    if replaces:
        try_remove(aside)


def try_remove(folder: Path) -> None:
    """Delete a cache if that works."""
    # There is a more important error to report, or none; the next build tries again.
    with contextlib.suppress(OSError):
        _remove(folder)


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
        _sync_one(file)
        folder = file.parent
        while folder not in folders:
            folders.add(folder)
            folder = folder.parent
    for folder in folders:
        _sync_one(folder)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".replaced")


def _restore_interrupted_overwrite(path: Path) -> None:
    """Undo the half of an overwrite that a killed build left behind."""
    aside = _aside(path)
    if not os.path.lexists(aside):
        return
    _check_leftover(aside)
    if os.path.lexists(path) or not is_craft_cache(aside):
        _remove(aside)
    else:
        aside.rename(path)


def _check_leftover(folder: Path) -> None:
    """Refuse to remove what a killed build cannot have left at `folder`."""
    if not folder.is_symlink() and folder.is_dir():
        # A build killed in its first or last instant leaves nothing, or zarr's own temporary file.
        blank = all(entry.match("zarr.*.partial") for entry in folder.iterdir())
        if blank or is_craft_cache(folder):
            return
    raise CraftError(
        f"{folder} is in the way.",
        why="builds use that name, and what is there is not a craft cache.",
        fix="move it away, or choose another path.",
    )


def _remove(folder: Path) -> None:
    """Delete a cache, its mark last: if this is killed, what remains is still known as ours."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
    shutil.rmtree(folder)


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e3:.1f} kB"


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
