"""Write a file or a folder whole or not at all: the one way in which craft replaces things on disk.

New content goes to a temporary sibling, which is renamed once it is complete. The sibling's name is
random and it must not exist yet, so that nobody can prepare a link there, and two processes that
write the same file never share one. On failure the sibling is removed and the destination keeps
what it had. Nothing else is ever removed.

A process that is killed leaves its sibling behind; `remove_leftovers` removes it. A file that is
being written is locked, so that it is not mistaken for one; folders are not, and are removed only
where no other process writes.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from craftcli.errors import CraftError
from craftcli.system.file_locks import lock_bytes

_TOKEN_BYTES = 8
_UNFINISHED = ".partial"
_REPLACED = ".replaced"
_SHOWN = 3
"""Files that an error names."""

# A process does not see its own locks.
_being_written: set[Path] = set()


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file; a file of that name is replaced."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file; a file of that name is replaced."""
    with whole_file(path) as file:
        file.write(data)


def write_link(path: Path, target: str) -> None:
    """Make a symbolic link, or point an existing one elsewhere, in one step."""
    fresh = temporary_sibling(path)
    fresh.symlink_to(target)
    try:
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink()
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that becomes `path` when the block ends, on disk by then.

    A link at `path` is replaced, not followed. The folder must exist.
    """
    fresh = temporary_sibling(path)
    _being_written.add(fresh)
    try:
        # "x" creates the file and never follows a link.
        with fresh.open("xb") as file:
            with suppress(OSError):  # a disk without locks
                lock_bytes(file.fileno(), 0, 1)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise
    finally:
        _being_written.discard(fresh)
    sync_path(path.parent)


@contextmanager
def whole_folder(path: Path, *, replace: bool = False, create: bool = True) -> Iterator[Path]:
    """A new folder that becomes `path` when the block ends.

    With `replace`, a folder at `path` is removed once the new one is in its place, and stays if
    that fails. With `create=False` the block creates the new folder itself, by the name given.

    Raises:
        FileExistsError: there is something at `path` and `replace` is not set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = temporary_sibling(path)
    if create:
        fresh.mkdir()
    try:
        yield fresh
        move_folder(fresh, path, replace=replace)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def move_folder(fresh: Path, path: Path, *, replace: bool = False) -> None:
    """Rename a complete folder to `path`; with `replace`, remove what was there afterwards."""
    if not os.path.lexists(path):
        fresh.rename(path)
    elif not replace:
        raise FileExistsError(f"{path} exists")
    else:
        old = temporary_sibling(path, _REPLACED)
        with set_aside(path, old):
            fresh.rename(path)
        with suppress(OSError):
            _remove(old)
    sync_path(path.parent)


@contextmanager
def set_aside(path: Path, aside: Path) -> Iterator[None]:
    """Rename `path` to `aside` while its successor is put in place; undo that if the block fails.

    `aside` is left to the caller, who knows how to remove it.
    """
    path.rename(aside)
    try:
        yield
    except BaseException:
        aside.rename(path)
        raise


def temporary_sibling(path: Path, ending: str = _UNFINISHED) -> Path:
    """A name beside `path` that nobody can guess; nothing is created."""
    return path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN_BYTES)}{ending}")


def set_aside_name(path: Path, *, unfinished: bool = False) -> Path:
    """A name beside `path` for what it held; with `unfinished`, for what is about to be removed."""
    return temporary_sibling(path, _UNFINISHED if unfinished else _REPLACED)


def is_set_aside(name: str, path: Path) -> bool:
    """Whether `set_aside_name` makes such names for `path`."""
    return _temporary_names(path, _REPLACED).fullmatch(name) is not None


def find_set_aside(path: Path) -> list[Path]:
    """What lies beside `path` under such names: killed processes leave it."""
    if not path.parent.is_dir():
        return []
    return [entry for entry in path.parent.iterdir() if is_set_aside(entry.name, path)]


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes left beside `path`; no other process may write a folder there.

    A file that another process is writing stays.
    """
    ours = _temporary_names(path, _UNFINISHED, _REPLACED)
    if not path.parent.is_dir():
        return
    for entry in path.parent.iterdir():
        if ours.fullmatch(entry.name) and not _is_being_written(entry):
            _remove(entry)


def _is_being_written(entry: Path) -> bool:
    """Whether a process has a temporary file locked."""
    if entry in _being_written:
        return True
    if entry.is_symlink() or not entry.is_file():
        return False
    with entry.open("r+b") as file:
        try:
            lock_bytes(file.fileno(), 0, 1)
        except OSError:  # locked, or on a disk without locks
            return True
    return False


def _temporary_names(path: Path, *endings: str) -> re.Pattern[str]:
    token = f"[0-9a-f]{{{2 * _TOKEN_BYTES}}}"
    return re.compile(rf"\.{re.escape(path.name)}\.{token}({'|'.join(map(re.escape, endings))})")


def foreign_files_error(path: object, foreign: list[str]) -> CraftError:
    """The error for a run, policy or cache to be replaced that holds files of the user's."""
    more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
    return CraftError(
        f"Refusing to overwrite {path}: it holds files that craft did not write.",
        why=f"{', '.join(foreign[:_SHOWN])}{more} would be lost.",
        fix="move them away, or choose another path.",
    )


def sync_path(path: Path) -> None:
    """Return once a file, or the entries of a folder, would survive a loss of power."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return  # folders cannot be opened there; the file system keeps its own journal of them
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(entry: Path) -> None:
    """Remove a file, a link (not what it points to) or a folder."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()
