"""One build at a time in an object store: an object that only one process can create.

A store does not drop the lock of a process that dies. A lock of a dead process of this machine is
taken over. Whether a process of another machine is dead cannot be known: the error names the
command that removes its lock.
"""

import contextlib
import json
import os
import socket
import uuid
from typing import Any

from craftcli.cache.storage.base import UnreachableStoreError
from craftcli.cache.storage.remote_folder import RemoteFolder
from craftcli.distributed import Processes
from craftcli.errors import CraftError

LOCK_FILE = "build.lock"
_REMOVE = {"s3": "aws s3 rm {}", "gs": "gcloud storage rm {}", "hf": "the Hub's web page"}

_held_here: set[str] = set()


class RemoteLock:
    """The lock of one build; only its first process holds it."""

    def __init__(self, folder: RemoteFolder, processes: Processes) -> None:
        self._folder = folder
        self._processes = processes
        self.owner: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "machine": _machine(),
            "host": socket.gethostname(),
            "process": os.getpid(),
        }
        """The content of the lock object."""

    def __repr__(self) -> str:
        return f"RemoteLock({self._object!r}, held={self.owner['id'] in _held_here})"

    def acquire(self) -> None:
        """Take the lock; the first process does this before it changes anything.

        Raises:
            CraftError: another build is running, or died on another machine.
        """
        owner = json.dumps(self.owner).encode()
        if not self._folder.create(LOCK_FILE, owner):
            self._remove_stale()
            if not self._folder.create(LOCK_FILE, owner):
                raise self._taken(self._read())
        _held_here.add(str(self.owner["id"]))

    def admit(self) -> None:
        """Do nothing: the other processes need no lock."""

    def join(self) -> None:
        """Do nothing: the first process holds the lock."""

    def release(self, *, done: bool = False) -> None:
        """Release the lock; `done` means that no process of this build writes any more."""
        if self.owner["id"] not in _held_here:
            return
        _held_here.discard(str(self.owner["id"]))
        if not self._folder.unreachable and (done or self._processes.alone):
            # There is a more important error to report; the next build takes the lock over.
            with contextlib.suppress(UnreachableStoreError):
                self._folder.remove(LOCK_FILE)

    @property
    def _object(self) -> str:
        return str(self._folder.path / LOCK_FILE)

    def _read(self) -> dict[str, Any]:
        try:
            owner = json.loads(self._folder.read(LOCK_FILE) or b"{}")
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}

    def _remove_stale(self) -> None:
        """Remove a lock of a dead process of this machine."""
        owner = self._read()
        if owner.get("machine") != self.owner["machine"]:
            return
        of_this_process = owner.get("process") == os.getpid()
        held = (
            owner.get("id") in _held_here if of_this_process else _is_running(owner.get("process"))
        )
        if not held:
            self._folder.remove(LOCK_FILE)

    def _taken(self, owner: dict[str, Any]) -> CraftError:
        who = (
            f"process {owner.get('process')} on {owner.get('host')}" if owner else "another process"
        )
        how = _REMOVE[self._folder.path.scheme].format(self._object)
        return CraftError(
            f"Another build into {self._folder.path} is running.",
            why=f"{who} holds {self._object}.",
            fix=f"wait until it ends, or choose another path; if it has died, remove that object "
            f"({how}) and continue with craft cache build --resume.",
        )


def _machine() -> str:
    # The name is not enough: many machines are called localhost.
    return f"{socket.gethostname()}-{uuid.getnode():x}"


def _is_running(process: Any) -> bool:
    """Whether a process of this machine is alive; True if that is unknown."""
    if os.name == "nt":  # there, signal 0 is Ctrl-C
        return True
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:
        return True
    return True
