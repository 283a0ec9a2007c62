"""The files of a cache in an object store: s3:// and gs:// through obstore, hf:// through fsspec.

Only this module and `zarr_layout` import zarr. It reads and writes objects through zarr's own
stores. Credentials and endpoints come from the environment, as for every tool of these stores. A
store writes an object whole or not at all, so that nothing has to be renamed or synced.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from zarr.abc.store import Store, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from craftcli.cache.storage.base import UnreachableStoreError
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.packed_chunks import PackedObjects
from craftcli.cache.storage.whole_chunks import ObjectChunks
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.locations import RemotePath

_RETRIES = 100_000
"""So many that the time limit ends them first; obstore's default of 10 lasts two seconds."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How a failed request to s3:// or gs:// is repeated, before it counts as failed.

    The Hub's own client decides that for hf://.
    """

    total_s: float = 180.0
    first_wait_s: float = 0.1
    """Time before the first repeat. Later waits are random, each up to twice the one before."""
    longest_wait_s: float = 5.0

    def faster(self, times: float) -> "Patience":
        """The same course in a fraction of the time."""
        seconds = {name: value / times for name, value in asdict(self).items()}
        return Patience(**seconds)


PATIENCE = Patience()

_INSTALL = "pip install 'craftcli[remote]'"


class RemoteFolder:
    """The objects with a common prefix of their keys."""

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self.store: Store = _open_store(path)
        self.unreachable = False
        """Whether a request failed for good; further ones would only cost time."""

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RemoteFolder({str(self.path)!r})"

    def chunks(
        self, name: str, rows: int, chunk_rows: int, spec: ArraySpec, *, packed: bool = False
    ) -> ObjectChunks | PackedObjects:
        """Chunks that are fetched whole."""
        kind = PackedObjects if packed else ObjectChunks
        return kind(objects=self, name=name, rows=rows, chunk_rows=chunk_rows, spec=spec)

    def read(self, name: str) -> bytes | None:
        """Read an object; None if there is none."""
        return self._get(name, None)

    def read_ending(self, name: str, size: int) -> bytes | None:
        """Read the last bytes of an object; None if there is none."""
        return self._get(name, SuffixByteRequest(size))

    def file_size(self, name: str) -> int | None:
        """Bytes of an object; None if there is none."""
        with self.explain_errors():
            try:
                return sync(self.store.getsize(name))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        with self.explain_errors():
            sync(self.store.set(name, _buffer(data)))

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless one exists; True if it is this one."""
        with self.explain_errors():
            sync(self.store.set_if_not_exists(name, _buffer(data)))
        return self.read(name) == data

    def remove(self, name: str) -> None:
        """Remove an object if it exists."""
        with self.explain_errors():
            sync(self.store.delete(name))

    def remove_tree(self, name: str) -> None:
        """Remove every object below a name."""
        with self.explain_errors():
            sync(self.store.delete_dir(name))

    def names(self, prefix: str = "") -> list[str]:
        """The objects below a name."""

        async def collect() -> list[str]:
            return [name async for name in self.store.list_prefix(prefix)]

        with self.explain_errors():
            return sync(collect())

    def remove_temporary_files(self) -> None:
        """Do nothing: a store has no temporary files."""

    def make_durable(self, names: Iterable[str]) -> None:
        """Do nothing: a store has an object on disk before it confirms the write."""

    @contextlib.contextmanager
    def explain_errors(self, need: int = 0) -> Iterator[None]:
        """Turn the errors of the store into an UnreachableStoreError."""
        try:
            yield
        except CraftError:
            raise
        except _store_errors() as error:
            self.unreachable = True
            raise UnreachableStoreError(
                f"{self.path} cannot be reached.",
                why=f"{str(error).splitlines()[0]}.",
                fix="check the name, the network and your credentials; continue an interrupted "
                "build with craft cache build --resume.",
            ) from error

    def version_mark(self) -> object:
        """A value that changes when another cache takes the place of this one."""
        return self.read("zarr.json")

    def size(self) -> int:
        """Bytes of all objects."""
        with self.explain_errors():
            return sync(self.store.getsize_prefix(""))

    def modified(self) -> datetime:
        """When the cache was last changed."""
        store: Any = self.store
        with self.explain_errors():
            if self.path.scheme == "hf":
                filesystem = getattr(store.fs, "sync_fs", store.fs)
                found: datetime = filesystem.modified(f"{store.path}/zarr.json")
                return found
            import obstore

            return obstore.head(store.store, "zarr.json")["last_modified"]

    def _get(self, name: str, part: SuffixByteRequest | None) -> bytes | None:
        with self.explain_errors():
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

    retry: Any = {
        "retry_timeout": timedelta(seconds=PATIENCE.total_s),
        "max_retries": _RETRIES,
        "backoff": {
            "init_backoff": timedelta(seconds=PATIENCE.first_wait_s),
            "max_backoff": timedelta(seconds=PATIENCE.longest_wait_s),
            "base": 2,
        },
    }
    if path.scheme == "gs":
        return ObjectStore(GCSStore.from_url(path.url, retry_config=retry))
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL", ""))
    # An endpoint without TLS, such as a server of one's own, has to be named on purpose.
    options: Any = {"allow_http": endpoint.startswith("http://")}
    return ObjectStore(S3Store.from_url(path.url, client_options=options, retry_config=retry))


def _hub_store(url: str) -> Store:
    from zarr.storage import FsspecStore

    return FsspecStore.from_url(url)


def _store_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """The errors that stores raise, of the packages that are imported."""
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
