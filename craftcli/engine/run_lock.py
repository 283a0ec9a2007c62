"""One process at a time writes into a run: a lock that ends with the process that holds it.

The first process of a run locks a byte of `craft.lock` in the run's folder. The system drops the
lock when the process dies. The file is never removed, because a lock on a removed file keeps nobody
out; its text names the process that held it last.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from craftcli.errors import CraftError
from craftcli.system.file_locks import lock_bytes, unlock_bytes

LOCK_FILE = "craft.lock"
# Behind the text: on Windows, nobody else can read a byte that is locked.
_BYTE = 2**20
# The system does not set a process against itself, and closing the file twice would unlock it.
_held_here: set[tuple[int, int]] = set()


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that writes a run; None for what its lock does not tell."""

    pid: int | None = None
    host: str | None = None

    def __str__(self) -> str:
        if self.pid is None:
            return "another process"
        return f"process {self.pid} on {self.host}"


class NoLocksError(Exception):
    """The disk or the system has no file locks; the text says why."""


def holder(run: Path) -> Holder | None:
    """Who writes into the run now; None if nobody does, or if that cannot be found out."""
    file = run / LOCK_FILE
    if _identity(file) in _held_here:
        return Holder(pid=os.getpid(), host=socket.gethostname())
    try:
        descriptor = os.open(file, os.O_RDWR)
    except OSError:
        return None
    try:
        lock_bytes(descriptor, _BYTE, 1)
        unlock_bytes(descriptor, _BYTE, 1)
    except (BlockingIOError, PermissionError):
        return _read_holder(file)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def require_free(run: Path) -> None:
    """Refuse a run that another process writes.

    Raises:
        CraftError: there is one; its number and machine are in the message.
    """
    if found := holder(run):
        raise _in_use(run, found)


@contextmanager
def run_locked(run: Path) -> Iterator[None]:
    """Hold the lock of an existing folder for the duration of the context.

    Raises:
        CraftError: another process holds it, or the folder cannot be written.
        NoLocksError: there are no locks on this disk; nothing is held.
    """
    file = run / LOCK_FILE
    if _identity(file) in _held_here:
        raise _in_use(run, Holder(pid=os.getpid(), host=socket.gethostname()))
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise CraftError(
            f"Cannot write to {run}.",
            why=f"opening {file.name} failed: {error.strerror or error}.",
            fix="choose a folder that you may write to.",
        ) from error
    identity: tuple[int, int] | None = None
    try:
        _lock(descriptor, run)
        identity = _identity(file)
        if identity:
            _held_here.add(identity)
        yield
    finally:
        if identity:
            _held_here.discard(identity)
        os.close(descriptor)


def _lock(descriptor: int, run: Path) -> None:
    try:
        lock_bytes(descriptor, _BYTE, 1)
    except (BlockingIOError, PermissionError) as error:
        raise _in_use(run, _read_holder(run / LOCK_FILE)) from error
    except OSError as error:
        raise NoLocksError(error.strerror or str(error)) from error
    os.ftruncate(descriptor, 0)
    own = {"pid": os.getpid(), "host": socket.gethostname()}
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, json.dumps(own).encode())


def _read_holder(file: Path) -> Holder:
    try:
        found = json.loads(file.read_text("utf-8"))
        return Holder(pid=int(found["pid"]), host=str(found["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Holder()


def _identity(file: Path) -> tuple[int, int] | None:
    """What stays the same when the folder is renamed; None if there is no file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _in_use(run: Path, by: Holder) -> CraftError:
    return CraftError(
        f"The run {run} is in use.",
        why=f"{by} writes it now.",
        fix="wait until it ends, or stop it; a new run can go to another folder with --output.",
    )
