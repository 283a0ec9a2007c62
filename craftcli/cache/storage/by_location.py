"""Which storage a path or URL names: a local disk or an object store."""

from craftcli.cache.storage.base import CacheFolder, Destination
from craftcli.cache.storage.local_destination import LocalDestination
from craftcli.cache.storage.local_folder import LocalFolder
from craftcli.locations import Location, RemotePath, locate


def open_destination(path: str | Location) -> Destination:
    """The destination of a cache that is to be built."""
    location = locate(path)
    if isinstance(location, RemotePath):
        # Object stores are an optional extra, and most caches are folders.
        from craftcli.cache.storage.remote_destination import RemoteDestination

        return RemoteDestination(location)
    return LocalDestination(location)


def open_folder(path: str | Location) -> CacheFolder:
    """The files of a cache that exists."""
    location = locate(path)
    if isinstance(location, RemotePath):
        from craftcli.cache.storage.remote_folder import RemoteFolder

        return RemoteFolder(location)
    return LocalFolder(location)
