"""One build at a time in an object store: an object that only one process can create.

No store drops the lock of a process that dies. A lock of this very machine whose process is gone
is taken over; of another machine's nobody can know, and the error says how to remove it.
"""

import contextlib
import json
import os
import socket
import uuid
from typing import Any

from craftcli.cache.processes import Processes
from craftcli.cache.remote import RemoteFolder, StoreGoneError
from craftcli.errors import CraftError

LOCK = "build.lock"
_REMOVE = {"s3": "aws s3 rm {}", "gs": "gcloud storage rm {}", "hf": "the Hub's web page"}

_held_here: set[str] = set()


class RemoteLock:
    """The lock of one build; its other processes rely on the first one's."""

    def __init__(self, folder: RemoteFolder, processes: Processes) -> None:
        self._folder = folder
        self._processes = processes
        self._owner = {
            "id": uuid.uuid4().hex,
            "machine": _machine(),
            "host": socket.gethostname(),
            "process": os.getpid(),
        }

    def __repr__(self) -> str:
        return f"RemoteLock({self._object!r}, held={self._owner['id'] in _held_here})"

    def acquire(self) -> None:
        """Keep every other build out; for the first process, before it touches anything.

        Raises:
            CraftError: another build is at it, or died on another machine.
        """
        owner = json.dumps(self._owner).encode()
        if not self._folder.create(LOCK, owner):
            self._remove_stale()
            if not self._folder.create(LOCK, owner):
                raise self._taken(self._read())
        _held_here.add(str(self._owner["id"]))

    def admit(self) -> None:
        """The other processes need nothing."""

    def join(self) -> None:
        """The first process holds the lock."""

    def release(self, *, done: bool = False) -> None:
        """Let go; `done` says that no process of this build writes any more."""
        if self._owner["id"] not in _held_here:
            return
        _held_here.discard(str(self._owner["id"]))
        if not self._folder.gone and (done or self._processes.alone):
            # There is a more important error to report; the next build takes the lock over.
            with contextlib.suppress(StoreGoneError):
                self._folder.remove(LOCK)

    @property
    def _object(self) -> str:
        return str(self._folder.path / LOCK)

    def _read(self) -> dict[str, Any]:
        try:
            owner = json.loads(self._folder.read(LOCK) or b"{}")
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}

    def _remove_stale(self) -> None:
        """Remove a lock if its process was here and is gone."""
        owner = self._read()
        if owner.get("machine") != self._owner["machine"]:
            return
        ours = owner.get("process") == os.getpid()
        if owner.get("id") not in _held_here if ours else not _is_running(owner.get("process")):
            self._folder.remove(LOCK)

    def _taken(self, owner: dict[str, Any]) -> CraftError:
        who = f"process {owner.get('process')} on {owner.get('host')}" if owner else "somebody"
        how = _REMOVE[self._folder.path.scheme].format(self._object)
        return CraftError(
            f"Another build into {self._folder.path} is running.",
            why=f"{who} holds {self._object}.",
            fix=f"wait until it ends, or choose another path; if it has died, remove that object "
            f"({how}) and go on with craft cache build --resume.",
        )


def _machine() -> str:
    # The name alone would not do: many machines are called localhost.
    return f"{socket.gethostname()}-{uuid.getnode():x}"


def _is_running(process: Any) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:
        return True
    return True
