"""A cache in an object store: s3:// and gs:// through obstore, hf:// through fsspec.

With `store`, the one module that knows zarr: it opens zarr's own stores and asks them for objects.
Credentials and endpoints are those of the environment, as every tool of these stores reads them.
An object is written whole or not at all, so that there is nothing to rename or to sync.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

from zarr.abc.store import Store, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from craftcli.cache.chunks import ArraySpec
from craftcli.cache.whole_chunks import ObjectChunks
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.locations import RemotePath

RETRY_FOR_S = 180.0
"""How long a request is repeated, at growing distances, before the store counts as gone."""

_INSTALL = "pip install 'craftcli[remote]'"


class StoreGoneError(CraftError):
    """A store that does not answer, or does not let us in."""


class RemoteFolder:
    """Objects whose keys begin with a path."""

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self.store: Store = _open_store(path)
        self.gone = False
        """Whether the store did not answer, so that nothing is gained by asking it again."""

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RemoteFolder({str(self.path)!r})"

    def chunks(self, name: str, rows: int, chunk_rows: int, spec: ArraySpec) -> ObjectChunks:
        """Chunks that are fetched whole."""
        return ObjectChunks(objects=self, name=name, rows=rows, chunk_rows=chunk_rows, spec=spec)

    def read(self, name: str) -> bytes | None:
        """An object; None if there is none."""
        return self._get(name, None)

    def read_ending(self, name: str, size: int) -> bytes | None:
        """The last bytes of an object; None if there is none."""
        return self._get(name, SuffixByteRequest(size))

    def write(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        with self.guard():
            sync(self.store.set(name, _buffer(data)))

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; whether it is ours."""
        with self.guard():
            sync(self.store.set_if_not_exists(name, _buffer(data)))
        return self.read(name) == data

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with self.guard():
            sync(self.store.delete(name))

    def remove_tree(self, name: str) -> None:
        """Remove every object below a name."""
        with self.guard():
            sync(self.store.delete_dir(name))

    def names(self, prefix: str = "") -> list[str]:
        """The objects below a name."""

        async def collect() -> list[str]:
            return [name async for name in self.store.list_prefix(prefix)]

        with self.guard():
            return sync(collect())

    def sweep(self) -> None:
        """There are no temporary files."""

    def persist(self, names: Iterable[str]) -> None:
        """A store has what it said it has."""

    @contextlib.contextmanager
    def guard(self, need: int = 0) -> Iterator[None]:
        """Turn what the store may raise into an error that says what to do."""
        try:
            yield
        except CraftError:
            raise
        except _store_errors() as error:
            self.gone = True
            raise StoreGoneError(
                f"{self.path} cannot be reached.",
                why=f"{str(error).splitlines()[0]}.",
                fix="check the name, the network and your credentials; an interrupted build goes "
                "on with craft cache build --resume.",
            ) from error

    def mark(self) -> object:
        """What tells the cache that is here from another that takes its place."""
        return self.read("zarr.json")

    def size(self) -> int:
        """Bytes of all objects."""
        with self.guard():
            return sync(self.store.getsize_prefix(""))

    def modified(self) -> datetime:
        """When the cache was last changed."""
        store: Any = self.store
        with self.guard():
            if self.path.scheme == "hf":
                filesystem = getattr(store.fs, "sync_fs", store.fs)
                found: datetime = filesystem.modified(f"{store.path}/zarr.json")
                return found
            import obstore

            return obstore.head(store.store, "zarr.json")["last_modified"]

    def _get(self, name: str, part: SuffixByteRequest | None) -> bytes | None:
        with self.guard():
            found = sync(self.store.get(name, default_buffer_prototype(), part))
        return None if found is None else found.to_bytes()


def _open_store(path: RemotePath) -> Store:
    try:
        return _hub_store(path.url) if path.scheme == "hf" else _object_store(path)
    except ImportError as error:
        raise CraftError(
            f"Caches at {path.scheme}:// need a package that is not installed.",
            why=f"{error}.",
            fix=f"{_INSTALL}.",
            exit_code=EXIT_USAGE,
        ) from error
    except _store_errors(ValueError) as error:
        raise CraftError(
            f"{path} cannot be opened.",
            why=f"{str(error).splitlines()[0]}.",
            fix="check the URL and the settings of the store in the environment.",
            exit_code=EXIT_USAGE,
        ) from error


def _object_store(path: RemotePath) -> Store:
    from obstore.store import GCSStore, S3Store
    from zarr.storage import ObjectStore

    retry: Any = {"retry_timeout": timedelta(seconds=RETRY_FOR_S)}
    if path.scheme == "gs":
        return ObjectStore(GCSStore.from_url(path.url, retry_config=retry))
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL", ""))
    # Whoever names an endpoint without TLS, such as a server of their own, means it.
    options: Any = {"allow_http": endpoint.startswith("http://")}
    return ObjectStore(S3Store.from_url(path.url, client_options=options, retry_config=retry))


def _hub_store(url: str) -> Store:
    from zarr.storage import FsspecStore

    return FsspecStore.from_url(url)


def _store_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """What stores raise; only of packages that are in use."""
    errors: list[type[Exception]] = [OSError, *more]
    if "obstore" in sys.modules:
        from obstore.exceptions import BaseError

        errors.append(BaseError)
    if "httpx" in sys.modules:
        import httpx

        errors.append(httpx.HTTPError)
    return tuple(errors)


def _buffer(data: bytes) -> Any:
    return default_buffer_prototype().buffer.from_bytes(data)
