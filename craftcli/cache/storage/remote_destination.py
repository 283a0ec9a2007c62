"""A cache is built at its path in an object store, because a store cannot move a folder.

It counts as a cache once `complete` is true in its manifest, which is written last. A cache that
`--overwrite` replaces is removed when the new build starts.
"""

import contextlib
import json
from typing import Any

from craftcli.cache.storage.base import (
    SETTINGS_FILE,
    InterruptedBuild,
    UnreachableStoreError,
    already_exists_error,
    find_interrupted,
    half_built_error,
    not_a_cache_error,
)
from craftcli.cache.storage.own_files import foreign_files
from craftcli.cache.storage.remote_folder import RemoteFolder
from craftcli.cache.storage.remote_lock import LOCK_FILE, RemoteLock
from craftcli.distributed import Processes
from craftcli.locations import RemotePath
from craftcli.whole_files import foreign_files_error


class RemoteDestination:
    """A prefix in an object store."""

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self.folder = RemoteFolder(path)

    def lock(self, processes: Processes) -> RemoteLock:
        """A lock that is an object in the store."""
        return RemoteLock(self.folder, processes)

    def check(self, *, overwrite: bool, resume: bool) -> None:
        """Refuse to replace a finished cache or foreign files, or to lose committed chunks."""
        self.check_free(overwrite=overwrite)
        found = self.interrupted_build()
        if found and not (overwrite or resume):
            raise half_built_error(self.path, found)

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a path that holds something that must not be replaced."""
        manifest = self._manifest()
        if manifest is None:
            if any(name != LOCK_FILE for name in self.folder.names()):
                raise not_a_cache_error(self.path)
        elif manifest.get("complete") and not overwrite:
            raise already_exists_error(self.path)
        elif overwrite and (foreign := self._foreign_objects()):
            raise foreign_files_error(self.path, foreign)

    def interrupted_build(self) -> InterruptedBuild | None:
        """The interrupted build that can be resumed, if there is one."""
        manifest = self._manifest()
        if manifest is None or manifest.get("complete"):
            return None
        records = sum(name.rpartition("/")[2].isdigit() for name in self.folder.names("commit/c"))
        return find_interrupted(self.path, manifest, records, self.folder.read(SETTINGS_FILE))

    def prepare(self, *, overwrite: bool, resume: bool) -> bool:
        """Remove what is there, or reuse a resumable build; True if it was reused."""
        self.check(overwrite=overwrite, resume=resume)
        if resume and self.interrupted_build():
            return True
        self._clear()
        return False

    def publish(self, *, overwrite: bool) -> None:
        """Do nothing: the cache was built at its path."""

    def abandon(self) -> None:
        """Remove what was built; errors are dropped."""
        with contextlib.suppress(UnreachableStoreError):
            if not self.folder.unreachable:
                self._clear()

    def _clear(self) -> None:
        """Remove all but the lock; `zarr.json` last, so that the rest is still recognised."""
        manifest = self._manifest()
        if manifest is not None:
            # From now on the rest does not count as a cache.
            unfinished = _group_metadata({**manifest, "complete": False})
            self.folder.write("zarr.json", json.dumps(unfinished).encode())
        for name in self.folder.names():
            if name not in ("zarr.json", LOCK_FILE):
                self.folder.remove(name)
        self.folder.remove("zarr.json")

    def _foreign_objects(self) -> list[str]:
        """The objects below the path that craft did not write."""
        arrays = self._attributes().get("arrays")
        names = (name for name in self.folder.names() if name != LOCK_FILE)
        return foreign_files(names, arrays if isinstance(arrays, dict) else None)

    def _manifest(self) -> dict[str, Any] | None:
        """The manifest as it is stored; None if there is no cache, complete or not."""
        manifest = self._attributes().get("craft")
        return manifest if isinstance(manifest, dict) else None

    def _attributes(self) -> dict[str, Any]:
        try:
            attributes = json.loads(self.folder.read("zarr.json") or b"null")["attributes"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return {}
        return attributes if isinstance(attributes, dict) else {}


def _group_metadata(manifest: dict[str, Any]) -> dict[str, Any]:
    """A `zarr.json` by which a folder is known as craft's."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {"craft": manifest}}
