"""A cache is built beside its path on a local disk and moved there when it is complete.

The build folder is `<path>.partial`. It stays when a build is interrupted after its first committed
chunk, so that `--resume` can continue it. A complete cache is moved in three steps: the cache that
it replaces gets a random name, the new one becomes `<path>`, the old one is removed. If that is
interrupted, the next build undoes or completes it. Nothing that craft did not write is removed
(`own_files`), and the only link that is followed is `<path>` itself.

Without zarr, a folder is known as a cache by the attribute "craft" in its `zarr.json`.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from craftcli.cache.storage.base import (
    SETTINGS_FILE,
    InterruptedBuild,
    already_exists_error,
    find_interrupted,
    half_built_error,
    not_a_cache_error,
)
from craftcli.cache.storage.local_folder import LocalFolder
from craftcli.cache.storage.local_lock import LocalLock
from craftcli.cache.storage.own_files import foreign_in_folder, remove_own_files
from craftcli.distributed import Processes
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.whole_files import (
    find_set_aside,
    foreign_files_error,
    set_aside,
    set_aside_name,
    sync_path,
)

_BUILD = "craft cache build"


class LocalDestination:
    """A path on a local disk; a link is followed, so that the cache lands where it points."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve() if path.is_symlink() else path.absolute()
        if not self.path.name:
            raise CraftError(
                f"Refusing to write a cache to {path}.",
                why="it is the root of a disk, not a folder of its own.",
                fix="choose a folder with --output.",
                exit_code=EXIT_USAGE,
            )
        self.folder = LocalFolder(build_folder(self.path), cache=self.path)

    def lock(self, processes: Processes) -> LocalLock:
        """A lock that ends with its process."""
        return LocalLock(self.path, processes)

    def check(self, *, overwrite: bool, resume: bool) -> None:
        """Refuse early what `prepare` would refuse after the policy was loaded.

        Raises:
            CraftError: the path is taken, half-built, or cannot be written.
        """
        self.check_free(overwrite=overwrite)
        self._check_interrupted(overwrite=overwrite, resume=resume)
        folder = next(folder for folder in self.path.parents if folder.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            why = "is not a folder" if not folder.is_dir() else "cannot be written by you"
            raise CraftError(
                f"Cannot write {self.path}.",
                why=f"{folder} {why}.",
                fix="choose a folder that you may write to.",
            )

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a path that holds something, unless it is a cache and `overwrite` is set."""
        if not os.path.lexists(self.path):
            return
        if not is_craft_cache(self.path):
            raise not_a_cache_error(self.path)
        if not overwrite:
            raise already_exists_error(self.path)
        if foreign := _foreign_files(self.path):
            raise foreign_files_error(self.path, foreign)

    def interrupted_build(self) -> InterruptedBuild | None:
        """The interrupted build that can be resumed, if there is one."""
        folder = self.folder.path
        manifest = (read_attributes(folder) or {}).get("craft")
        try:
            # Names of zarr's temporary files are not digits alone.
            records = sum(name.isdigit() for name in os.listdir(folder / "commit/c"))
            return find_interrupted(folder, manifest, records, self.folder.read(SETTINGS_FILE))
        except OSError:
            return None

    def prepare(self, *, overwrite: bool, resume: bool) -> bool:
        """Create the build folder, or reuse a resumable one; True if it was reused.

        Raises:
            CraftError: the path is taken, a foreign file is in the way, or the folder cannot be
                created.
        """
        self._undo_interrupted_replacement()
        self.check_free(overwrite=overwrite)
        folder = self.folder.path
        if os.path.lexists(folder):
            _check_leftover(folder)
            self._check_interrupted(overwrite=overwrite, resume=resume)
            if resume and self.interrupted_build():
                return True
            remove_own_files(folder, _arrays(folder))
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise CraftError(
                f"Cannot write {self.path}.",
                why=f"creating {folder} failed: {error.strerror or error}.",
                fix="choose a folder that you may write to.",
            ) from error
        return False

    def publish(self, *, overwrite: bool) -> None:
        """Move the complete cache to its path; the one that it replaces returns if that fails."""
        self.check_free(overwrite=overwrite)
        aside = set_aside_name(self.path)
        replaces = os.path.lexists(self.path)
        with set_aside(self.path, aside) if replaces else contextlib.nullcontext():
            self.folder.path.rename(self.path)
        sync_path(self.path.parent)
        if replaces:
            _try_remove(aside)

    def abandon(self) -> None:
        """Remove what was built; errors are dropped."""
        _try_remove(self.folder.path)

    def _check_interrupted(self, *, overwrite: bool, resume: bool) -> None:
        """Refuse to lose committed chunks unless `overwrite` or `resume` is set."""
        found = self.interrupted_build()
        if found and not (overwrite or resume):
            raise half_built_error(self.path, found)

    def _undo_interrupted_replacement(self) -> None:
        """Repair the state that a build leaves when it is killed in `publish`."""
        for aside in find_set_aside(self.path):
            if is_craft_cache(aside) and not os.path.lexists(self.path):
                aside.rename(self.path)
            elif _is_leftover(aside):
                remove_own_files(aside, _arrays(aside))


def is_craft_cache(path: Path) -> bool:
    """Whether a folder is a cache of craft's, complete or not."""
    attributes = read_attributes(path)
    return attributes is not None and isinstance(attributes.get("craft"), dict)


def read_attributes(path: Path) -> dict[str, Any] | None:
    """The attributes of the Zarr group in a folder; None if there is none that can be read."""
    try:
        metadata = json.loads((path / "zarr.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    attributes = metadata.get("attributes") if isinstance(metadata, dict) else None
    return attributes if isinstance(attributes, dict) else None


def build_folder(path: Path) -> Path:
    """Where the cache for `path` is built."""
    return path.with_name(path.name + ".partial")


def missing_cache_error(path: Path) -> CraftError:
    """The error for a path without a cache folder: what is there, and what a build left."""
    if os.path.lexists(path):
        why = "it is not a folder." if path.exists() else "it is a link to nothing."
        return CraftError(
            f"{path} is not a craft cache.", why=why, fix=f"give a folder that {_BUILD} wrote."
        )
    # Earlier versions of craft gave the old one a fixed name.
    aside = [*find_set_aside(path), path.with_name(path.name + ".replaced")]
    old, partial = [folder for folder in aside if is_craft_cache(folder)], build_folder(path)
    if old:
        why = f"a build was killed while it replaced the cache; the old one is {old[0]}."
        fix = f"rename that to {path.name}, or run {_BUILD}."
    elif partial.exists():
        why = f"it is only half-built: a killed or running command left {partial}."
        resumable = LocalDestination(path).interrupted_build()
        fix = "wait if it is running, else " + (
            f"continue it with {_BUILD} --resume." if resumable else "start it again."
        )
    else:
        why, fix = "nothing is there.", f"check the path, or make one with {_BUILD}."
    return CraftError(f"No cache at {path}.", why=why, fix=fix)


def _foreign_files(folder: Path) -> list[str]:
    """The files in a cache that craft did not write."""
    return foreign_in_folder(folder, _arrays(folder))


def _arrays(folder: Path) -> dict[str, Any] | None:
    """The arrays of a cache; None if its metadata does not say."""
    arrays = (read_attributes(folder) or {}).get("arrays")
    return arrays if isinstance(arrays, dict) else None


def _is_leftover(folder: Path) -> bool:
    """Whether a killed build can have left a folder, and nothing in it is of the user's."""
    if folder.is_symlink() or not folder.is_dir() or _foreign_files(folder):
        return False
    # Without `zarr.json` a build was killed in its first or last instant; a Zarr group of anybody
    # else has that file.
    return is_craft_cache(folder) or not (folder / "zarr.json").exists()


def _check_leftover(folder: Path) -> None:
    """Refuse to remove or reuse a folder that a killed build cannot have left."""
    if not _is_leftover(folder):
        raise CraftError(
            f"Refusing to overwrite {folder}: it is not a craft cache.",
            why="a build needs that name for its own files, and it holds others.",
            fix="move it away, or choose another path.",
        )


def _try_remove(folder: Path) -> None:
    """Delete a cache; errors are dropped."""
    # There is a more important error to report, or none; the next build tries again.
    with contextlib.suppress(OSError):
        remove_own_files(folder, _arrays(folder))
