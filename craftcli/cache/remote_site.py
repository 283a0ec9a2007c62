"""The place of a cache in an object store, where it is built."""

import contextlib
import json
from typing import Any

from craftcli.cache.places import Unfinished, already_there, half_built, not_ours, unfinished_of
from craftcli.cache.processes import Processes
from craftcli.cache.remote import RemoteFolder, StoreGoneError
from craftcli.cache.remote_lock import LOCK, RemoteLock
from craftcli.locations import RemotePath


class RemoteSite:
    """A place in an object store."""

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self.folder = RemoteFolder(path)

    def lock(self, processes: Processes) -> RemoteLock:
        """A lock that is an object."""
        return RemoteLock(self.folder, processes)

    def check(self, *, overwrite: bool, resume: bool) -> None:
        """Refuse what may not be replaced or thrown away."""
        self.check_free(overwrite=overwrite)
        found = self.unfinished()
        if found and not (overwrite or resume):
            raise half_built(self.path, found)

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a place that holds something which may not be replaced."""
        manifest = self._manifest()
        if manifest is None:
            if any(name != LOCK for name in self.folder.names()):
                raise not_ours(self.path)
        elif manifest.get("complete") and not overwrite:
            raise already_there(self.path)

    def unfinished(self) -> Unfinished | None:
        """An interrupted build that can be gone on with."""
        manifest = self._manifest()
        if manifest is None or manifest.get("complete"):
            return None
        records = sum(name.rpartition("/")[2].isdigit() for name in self.folder.names("commit/c"))
        return unfinished_of(self.path, manifest, records, self.folder.read("build.json"))

    def prepare(self, *, overwrite: bool, resume: bool) -> bool:
        """Have nothing there, or something to go on with; whether it is the latter."""
        self.check(overwrite=overwrite, resume=resume)
        if resume and self.unfinished():
            return True
        self._clear()
        return False

    def publish(self, *, overwrite: bool) -> None:
        """It is in its place already."""

    def abandon(self) -> None:
        """Remove what was built, if that works."""
        with contextlib.suppress(StoreGoneError):
            if not self.folder.gone:
                self._clear()

    def _clear(self) -> None:
        """Remove everything but the lock, the mark last: what remains is still known as ours."""
        manifest = self._manifest()
        if manifest is not None:
            # From now on nobody takes what is left for a cache.
            self.folder.write(
                "zarr.json", json.dumps(_mark({**manifest, "complete": False})).encode()
            )
        for name in self.folder.names():
            if name not in ("zarr.json", LOCK):
                self.folder.remove(name)
        self.folder.remove("zarr.json")

    def _manifest(self) -> dict[str, Any] | None:
        """What the cache here says of itself; None if there is none, whole or not."""
        try:
            metadata = json.loads(self.folder.read("zarr.json") or b"null")
            manifest = metadata["attributes"]["craft"]
        except (ValueError, TypeError, KeyError):
            return None
        return manifest if isinstance(manifest, dict) else None


def _mark(manifest: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a group that is known as craft's."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {"craft": manifest}}
