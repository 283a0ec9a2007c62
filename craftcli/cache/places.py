"""Where a cache is built and how it gets to its place; no zarr, a cache is a folder with a mark.

A cache grows in `<path>.partial`, which stays when the build is interrupted and chunks of it are
committed. When it is complete, what it replaces steps aside to `<path>.replaced`, it moves to
`path`, and the old one is removed. Whenever this is interrupted, the next build finds out what
happened, and nothing that craft did not write is ever removed.
"""

import contextlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craftcli.cache.disk import sync_one
from craftcli.errors import CraftError
from craftcli.locations import Location

_BUILD = "craft cache build"
SETTINGS = "build.json"
"""File of an unfinished cache with what its bytes depend on beside the manifest."""
NOT_RESUMABLE = b"null"
"""Its contents when nothing can go on with what is there, as after `craft cache merge`."""


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """What an interrupted build left, or what a running one has so far."""

    folder: Location
    committed: int
    """Chunks with a commit record."""
    chunks: int
    """Chunks of the whole cache."""

    def __str__(self) -> str:
        return f"{self.committed} of {self.chunks} chunks in {self.folder}"


def is_craft_cache(path: Path) -> bool:
    """Whether a folder carries craft's mark, complete or not."""
    attributes = read_attributes(path)
    return attributes is not None and isinstance(attributes.get("craft"), dict)


def read_attributes(path: Path) -> dict[str, Any] | None:
    """The attributes of the Zarr group in a folder; None if there is none that can be read."""
    try:
        metadata = json.loads((path / "zarr.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    attributes = metadata.get("attributes") if isinstance(metadata, dict) else None
    return attributes if isinstance(attributes, dict) else None


def place_of(path: Path) -> Path:
    """Where a cache really goes: a link is followed, so that it lands on the disk it points to."""
    return path.resolve() if path.is_symlink() else path.absolute()


def partial_folder(path: Path) -> Path:
    """Where the cache for `path` grows."""
    return path.with_name(path.name + ".partial")


def find_unfinished(path: Path) -> Unfinished | None:
    """The interrupted build of the cache at `path`, if chunks of it are committed."""
    folder = partial_folder(place_of(path))
    manifest: Any = (read_attributes(folder) or {}).get("craft")
    try:
        # Zarr's temporary files are not named by digits alone.
        records = sum(name.isdigit() for name in os.listdir(folder / "commit/c"))
        settings = folder / SETTINGS
        return unfinished_of(
            folder, manifest, records, settings.read_bytes() if settings.exists() else None
        )
    except OSError:
        return None


def unfinished_of(
    folder: Location, manifest: Any, records: int, settings: bytes | None
) -> Unfinished | None:
    """What a folder with that manifest and as many commit records is, if it can be gone on with.

    `settings` is its file of that name; it is gone once there is nothing left to compute.
    """
    try:
        chunks = -(-manifest["rows"] // manifest["rows_per_chunk"])
    except (TypeError, KeyError, ArithmeticError):
        return None
    if not records or settings == NOT_RESUMABLE:
        return None
    return Unfinished(folder=folder, committed=records, chunks=chunks)


def check_place(path: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse early what `make_partial` would refuse late: a build loads a policy before it writes.

    Raises:
        CraftError: `path` is taken, half-built, or cannot be written.
    """
    path = place_of(path)
    check_destination(path, overwrite=overwrite)
    _check_unfinished(path, overwrite=overwrite, resume=resume)
    folder = next(folder for folder in path.parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "is not a folder" if not folder.is_dir() else "cannot be written by you"
        raise CraftError(
            f"Cannot write {path}.",
            why=f"{folder} {why}.",
            fix="choose a folder that you may write to.",
        )


def check_destination(path: Path, *, overwrite: bool) -> None:
    """Refuse a path that holds something, unless it is a cache that may be replaced."""
    if not os.path.lexists(path):
        return
    if not is_craft_cache(path):
        raise not_ours(path)
    if not overwrite:
        raise already_there(path)


def not_ours(path: Location) -> CraftError:
    """The error for a path that holds something else."""
    return CraftError(
        f"{path} exists and is not a craft cache.",
        why="craft replaces nothing but its own caches.",
        fix="choose another path, or move what is there away.",
    )


def already_there(path: Location) -> CraftError:
    """The error for a path that holds a cache."""
    return CraftError(
        f"{path} already exists.",
        why="a cache is not replaced unless you ask for it.",
        fix="pass --overwrite, or choose another path.",
    )


def half_built(path: Location, found: Unfinished) -> CraftError:
    """The error for a path at which committed chunks would be thrown away."""
    return CraftError(
        f"{path} is half-built.",
        why=f"a build that was interrupted, or still runs, committed {found}.",
        fix=f"go on with {_BUILD} --resume, or give it up for what you do now with --overwrite.",
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
    elif partial_folder(path).exists():
        why = f"it is only half-built: a killed or running command left {partial_folder(path)}."
        fix = "wait if it is running, else " + (
            f"go on with {_BUILD} --resume." if find_unfinished(path) else "start it again."
        )
    else:
        why, fix = "nothing is there.", f"check the path, or make one with {_BUILD}."
    return CraftError(f"No cache at {path}.", why=why, fix=fix)


def make_partial(path: Path, *, overwrite: bool, resume: bool = False) -> Path:
    """The folder to build in, after a check of `path` and of what a killed build left.

    It is empty, unless `resume` is asked for and there are committed chunks to go on with.

    Raises:
        CraftError: `path` is taken, something else is in the way, or the folder cannot be made.
    """
    _restore_interrupted_overwrite(path)
    check_destination(path, overwrite=overwrite)
    partial = partial_folder(path)
    if os.path.lexists(partial):
        _check_leftover(partial)
        _check_unfinished(path, overwrite=overwrite, resume=resume)
        if resume and find_unfinished(path):
            return partial
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
    sync_one(path.parent)
    if replaces:
        try_remove(aside)


def try_remove(folder: Path) -> None:
    """Delete a cache if that works."""
    # There is a more important error to report, or none; the next build tries again.
    with contextlib.suppress(OSError):
        _remove(folder)


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


def _check_unfinished(path: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse to throw away what an interrupted build committed, unless that is asked for."""
    found = find_unfinished(path)
    if found and not (overwrite or resume):
        raise half_built(path, found)


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
        elif entry.name != "zarr.json":
            entry.unlink()
    shutil.rmtree(folder)
