"""A local object store, a small cache in it, and builds of that cache that break off."""

import logging
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import obstore
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

from craftcli.cache.format import Manifest
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.zarr_layout import required_arrays
from craftcli.cache.writing.unfinished import Resumable
from craftcli.cache.writing.writer import CacheWriter
from craftcli.locations import Location, RemotePath
from made.manifests import make_manifest
from made.rows import Rows, rows_of_chunk

BUCKET = "anchors"
CHUNKS = 3
TASKS = ["push the cube", "öffne die Tür"]


@dataclass
class Bucket:
    """A bucket of the server, and the server's switch."""

    server: ThreadedMotoServer
    endpoint: str

    def new_path(self) -> RemotePath:
        """A place that nobody used yet."""
        return RemotePath(f"s3://{BUCKET}/{uuid.uuid4().hex}/a.zarr")

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        port = int(self.endpoint.rpartition(":")[2])
        self.server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
        self.server.start()


@contextmanager
def served(name: str = BUCKET) -> Iterator[Bucket]:
    """A moto server on loopback with one bucket; s3:// URLs are asked of it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    found = Bucket(server, f"http://{host}:{port}")
    request = urllib.request.Request(f"{found.endpoint}/{name}", method="PUT")
    urllib.request.urlopen(request, timeout=10).close()
    environment = {
        "AWS_ENDPOINT_URL": found.endpoint,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment.items():
            patch.setenv(variable, value)
        yield found
    found.stop()


def raw(path: RemotePath) -> Any:
    """The store below a path, past craft and zarr."""
    return S3Store.from_url(path.url, client_options={"allow_http": True})


def tree(path: Location) -> dict[str, bytes]:
    """Every file of a cache by its name."""
    if isinstance(path, Path):
        files = (file for file in path.rglob("*") if file.is_file())
        return {str(file.relative_to(path)): file.read_bytes() for file in files}
    store = raw(path)
    names = [entry["path"] for entry in obstore.list(store).collect()]
    return {name: bytes(obstore.get(store, name).bytes()) for name in names}


# The last chunk is not full, the hidden states are packed.
make_begun = partial(
    make_manifest,
    complete=False,
    rows=CHUNKS * 3 - 1,
    rows_per_chunk=3,
    layers=(3,),
    packed=("hidden/vlm.3",),
    versions={"torch": "2.10"},
)


def arrays_of(manifest: Manifest) -> dict[str, ArraySpec]:
    return required_arrays(manifest) | {"inputs/image": ArraySpec(shape=(3, 2, 2), dtype="uint8")}


def rows_of(manifest: Manifest, chunk: int) -> Rows:
    return rows_of_chunk(manifest, arrays_of(manifest), chunk)


class StoppedError(Exception):
    """What breaks a build off."""


def begin(
    path: Location, manifest: Manifest, *, overwrite: bool = False, resume: bool = False
) -> CacheWriter:
    return CacheWriter.create(
        path,
        manifest,
        arrays_of(manifest),
        tasks=TASKS,
        overwrite=overwrite,
        resumable=Resumable(resume=resume, settings={"batch_size": 8}),
    )


def build(
    path: Location,
    manifest: Manifest | None = None,
    *,
    before_chunk: Callable[[int], None] = lambda _: None,
    **asked: bool,
) -> set[int]:
    """Build a cache; the chunks that were reused."""
    manifest = manifest or make_begun()
    with begin(path, manifest, **asked) as writer:
        for chunk in range(manifest.chunk_count):
            before_chunk(chunk)
            if chunk not in writer.reused:
                writer.write_chunk(chunk, rows_of(manifest, chunk))
        writer.finish()
    return set(writer.reused)


def stop_before(number: int) -> Callable[[int], None]:
    def stop(chunk: int) -> None:
        if chunk == number:
            raise StoppedError

    return stop


def expected(name: str) -> npt.NDArray[Any]:
    manifest = make_begun()
    return np.concatenate([rows_of(manifest, chunk)[name] for chunk in range(CHUNKS)])
