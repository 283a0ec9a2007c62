"""Where a build happens and how it ends: on a local disk, or in an object store.

On a disk a cache grows beside its place and is moved there (`places`). A store has no such move:
there it grows in its place, and counts as a cache only once its manifest says that it is complete,
which is written last. What an `--overwrite` replaces there is gone when the new build begins.
"""

from pathlib import Path
from typing import Protocol

from craftcli.cache import places
from craftcli.cache.folders import Folder, LocalFolder
from craftcli.cache.lock import BuildLock
from craftcli.cache.places import Unfinished
from craftcli.cache.processes import Processes
from craftcli.locations import Location, RemotePath, locate


class Lock(Protocol):
    """What keeps other builds out; see `lock.BuildLock`."""

    def acquire(self) -> None:
        """Keep every other build out."""
        ...

    def admit(self) -> None:
        """Let the other processes of this build in."""
        ...

    def join(self) -> None:
        """Come in behind the first process."""
        ...

    def release(self, *, done: bool = False) -> None:
        """Let go."""
        ...


class Site(Protocol):
    """The place of one cache, before, while and after it is built."""

    @property
    def path(self) -> Location:
        """Where the cache goes."""
        ...

    @property
    def folder(self) -> Folder:
        """Where it grows."""
        ...

    def lock(self, processes: Processes) -> Lock:
        """What keeps other builds out of it."""
        ...

    def check(self, *, overwrite: bool, resume: bool) -> None:
        """Refuse early what `prepare` would refuse late."""
        ...

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a place that holds something which may not be replaced."""
        ...

    def unfinished(self) -> Unfinished | None:
        """An interrupted build that can be gone on with."""
        ...

    def prepare(self, *, overwrite: bool, resume: bool) -> bool:
        """Have an empty folder, or one to go on with; whether it is the latter."""
        ...

    def publish(self, *, overwrite: bool) -> None:
        """Put the complete cache in its place."""
        ...

    def abandon(self) -> None:
        """Remove what was built, if that works."""
        ...


class LocalSite:
    """A place on a local disk."""

    def __init__(self, path: Path) -> None:
        self.path = places.place_of(path)
        self.folder = LocalFolder(places.partial_folder(self.path), cache=self.path)

    def lock(self, processes: Processes) -> BuildLock:
        """A lock that ends with its process."""
        return BuildLock(self.path, processes)

    def check(self, *, overwrite: bool, resume: bool) -> None:
        """Refuse early what `prepare` would refuse late."""
        places.check_place(self.path, overwrite=overwrite, resume=resume)

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a place that holds something which may not be replaced."""
        places.check_destination(self.path, overwrite=overwrite)

    def unfinished(self) -> Unfinished | None:
        """An interrupted build that can be gone on with."""
        return places.find_unfinished(self.path)

    def prepare(self, *, overwrite: bool, resume: bool) -> bool:
        """Have an empty folder, or one to go on with; whether it is the latter."""
        folder = places.make_partial(self.path, overwrite=overwrite, resume=resume)
        return places.is_craft_cache(folder)

    def publish(self, *, overwrite: bool) -> None:
        """Move the cache to its place."""
        self.check_free(overwrite=overwrite)
        places.move_into_place(self.folder.path, self.path)

    def abandon(self) -> None:
        """Remove what was built, if that works."""
        places.try_remove(self.folder.path)


def open_site(path: str | Location) -> Site:
    """The place that a path or a URL names."""
    location = locate(path)
    if isinstance(location, RemotePath):
        # Stores are an optional extra, and most caches are folders.
        from craftcli.cache.remote_site import RemoteSite

        return RemoteSite(location)
    return LocalSite(location)


def open_folder(path: str | Location) -> Folder:
    """The place of a cache that is there."""
    location = locate(path)
    if isinstance(location, RemotePath):
        from craftcli.cache.remote import RemoteFolder

        return RemoteFolder(location)
    return LocalFolder(location)
