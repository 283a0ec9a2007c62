"""Caches in an object store: a moto server on loopback that is asked as S3 would be."""

import json
import logging
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import obstore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made.manifests import make_manifest
from made.rows import Rows, rows_of_chunk
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

from craftcli.cache import remote
from craftcli.cache import writer as writer_module
from craftcli.cache.chunks import ArraySpec
from craftcli.cache.draft import Resumable
from craftcli.cache.format import Manifest
from craftcli.cache.processes import Processes
from craftcli.cache.reader import CacheReader
from craftcli.cache.remote import RemoteFolder, StoreGoneError
from craftcli.cache.remote_lock import LOCK, RemoteLock
from craftcli.cache.sites import open_site
from craftcli.cache.store import required_arrays
from craftcli.cache.writer import CacheWriter
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE, CraftError
from craftcli.locations import Location, RemotePath, locate

CHUNKS = 3
TASKS = ["push the cube", "öffne die Tür"]


@dataclass
class Bucket:
    """The bucket of the server, and the server's switch."""

    server: ThreadedMotoServer
    endpoint: str

    def new_path(self) -> RemotePath:
        """A place that nobody used yet."""
        return RemotePath(f"s3://anchors/{uuid.uuid4().hex}/a.zarr")

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        port = int(self.endpoint.rpartition(":")[2])
        self.server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
        self.server.start()


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


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    found = Bucket(server, f"http://{host}:{port}")
    request = urllib.request.Request(f"{found.endpoint}/anchors", method="PUT")
    urllib.request.urlopen(request, timeout=10).close()
    environment = {
        "AWS_ENDPOINT_URL": found.endpoint,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        # A store that is gone is given up soon, and local copies need not survive a power cut.
        patch.setattr(remote, "RETRY_FOR_S", 0.5)
        patch.setattr(os, "fsync", lambda _: None)
        yield found
    found.stop()


@pytest.fixture
def path(bucket: Bucket) -> RemotePath:
    return bucket.new_path()


# The last chunk is not full.
make_begun = partial(
    make_manifest,
    complete=False,
    rows=CHUNKS * 3 - 1,
    rows_per_chunk=3,
    layers=(3,),
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


@pytest.fixture(scope="module")
def local(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same cache on a disk."""
    path = tmp_path_factory.mktemp("local") / "a.zarr"
    build(path)
    return path


@pytest.fixture
def uploaded(local: Path, path: RemotePath) -> RemotePath:
    """That cache copied to the store, which is quicker than to build it there."""
    for name, data in tree(local).items():
        obstore.put(raw(path), name, data)
    return path


def expected(name: str) -> npt.NDArray[Any]:
    manifest = make_begun()
    return np.concatenate([rows_of(manifest, chunk)[name] for chunk in range(CHUNKS)])


def test_a_remote_cache_has_the_bytes_of_a_local_one(path: RemotePath, local: Path) -> None:
    build(path)
    assert tree(path) == tree(local)
    reader = CacheReader.open(path)
    assert reader.verify() == []
    assert reader.size_on_disk() == sum(map(len, tree(path).values()))
    assert reader.modified().tzinfo is not None


@settings(deadline=None, derandomize=True, max_examples=4)
@given(
    rows=st.integers(1, 9),
    chunk=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    memory=st.sampled_from(["ram", "mmap"]),
    data=st.data(),
)
def test_what_is_written_is_what_is_read(
    bucket: Bucket, rows: int, chunk: int, dtype: str, memory: str, data: st.DataObject
) -> None:
    manifest = make_begun(rows=rows, rows_per_chunk=chunk, dtype=dtype)
    path = bucket.new_path()
    build(path, manifest)
    wanted = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=8)), np.int64)
    reader = CacheReader.open(path, memory=memory)
    for name in reader.array_names():
        parts = [rows_of(manifest, number)[name] for number in range(manifest.chunk_count)]
        written = np.concatenate(parts)
        np.testing.assert_array_equal(reader.read(name, wanted), written[wanted])
        np.testing.assert_array_equal(reader.read_all(name), written)


@pytest.mark.parametrize("stopped", [1, 2])
def test_a_broken_off_build_is_resumed_to_the_same_bytes(
    path: RemotePath, local: Path, stopped: int
) -> None:
    with pytest.raises(StoppedError):
        build(path, before_chunk=stop_before(stopped))
    with pytest.raises(CraftError, match="incomplete") as refused:
        CacheReader.open(path)
    assert "--resume" in refused.value.fix
    assert str(open_site(path).unfinished()) == f"{stopped} of {CHUNKS} chunks in {path}"
    with pytest.raises(CraftError, match="half-built"):
        build(path)
    assert build(path, resume=True) == set(range(stopped))
    assert tree(path) == tree(local)


@pytest.mark.parametrize("step", ["stats_chunks", "update_manifest"])
def test_a_build_that_breaks_off_while_it_finishes_is_resumed(
    path: RemotePath, local: Path, step: str
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, step, stop)
        with pytest.raises(StoppedError):
            build(path)
    with pytest.raises(CraftError, match="incomplete"):
        CacheReader.open(path)
    assert build(path, resume=True) == set(range(CHUNKS))
    assert tree(path) == tree(local)


def test_a_payload_without_its_record_is_computed_again(path: RemotePath, local: Path) -> None:
    with pytest.raises(StoppedError):
        build(path, before_chunk=stop_before(2))
    obstore.delete(raw(path), "commit/c/1")
    obstore.put(raw(path), "inputs/image/c/0/0/0/0", b"half")
    assert build(path, resume=True) == set()
    assert tree(path) == tree(local)


def test_a_build_with_other_settings_is_not_continued(path: RemotePath) -> None:
    with pytest.raises(StoppedError):
        build(path, before_chunk=stop_before(2))
    with pytest.raises(CraftError, match="other values of seed"):
        build(path, make_begun(seed=1), resume=True)
    build(path, make_begun(seed=1), overwrite=True)
    assert CacheReader.open(path).manifest.seed == 1


def test_a_cache_is_replaced_only_when_asked(uploaded: RemotePath) -> None:
    obstore.put(raw(uploaded), "hidden/vlm.1/c/0/0/0", b"of more layers")
    before = tree(uploaded)
    with pytest.raises(CraftError, match="already exists"):
        build(uploaded)
    assert tree(uploaded) == before
    with pytest.raises(StoppedError):
        build(uploaded, overwrite=True, before_chunk=stop_before(0))
    # There is no moving aside in a store: what was to be replaced is gone.
    assert tree(uploaded) == {}


def test_nothing_but_caches_is_replaced(path: RemotePath) -> None:
    obstore.put(raw(path), "thesis.pdf", b"years of work")
    with pytest.raises(CraftError, match="not a craft cache"):
        build(path, overwrite=True)
    assert tree(path) == {"thesis.pdf": b"years of work"}


def test_the_second_build_is_refused(path: RemotePath, local: Path) -> None:
    manifest = make_begun()
    with begin(path, manifest) as first:
        with pytest.raises(CraftError, match="Another build") as refused:
            build(path, overwrite=True)
        assert f"process {os.getpid()}" in refused.value.why
        for chunk in range(CHUNKS):
            first.write_chunk(chunk, rows_of(manifest, chunk))
        first.finish()
    assert tree(path) == tree(local)


def lock_of(path: RemotePath, **changes: Any) -> None:
    """Leave the lock of some process."""
    lock = RemoteLock(RemoteFolder(path), Processes())
    obstore.put(raw(path), LOCK, json.dumps(lock._owner | changes).encode())


def test_the_lock_of_a_process_that_died_here_is_taken_over(path: RemotePath, local: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    lock_of(path, process=int(dead.stdout))
    build(path)
    assert tree(path) == tree(local)


@pytest.mark.parametrize("changes", [{"machine": "elsewhere", "host": "far"}, {"process": 1}])
def test_a_lock_that_may_be_alive_stays_and_the_error_says_how_to_remove_it(
    path: RemotePath, changes: dict[str, Any]
) -> None:
    lock_of(path, **changes)
    with pytest.raises(CraftError, match="Another build") as refused:
        build(path)
    assert f"aws s3 rm {path}/{LOCK}" in refused.value.fix
    assert list(tree(path)) == [LOCK]
    obstore.delete(raw(path), LOCK)
    begin(path, make_begun()).__exit__(None, None, None)
    assert tree(path) == {}


def test_a_store_that_goes_away_stops_the_build_which_then_resumes(
    bucket: Bucket, path: RemotePath, local: Path
) -> None:
    def switch_off(chunk: int) -> None:
        if chunk == 1:
            bucket.stop()

    try:
        with pytest.raises(StoreGoneError, match="cannot be reached") as gone:
            build(path, before_chunk=switch_off)
        assert "--resume" in gone.value.fix
    finally:
        bucket.start()
    with pytest.raises(CraftError, match="incomplete"):
        CacheReader.open(path)
    assert build(path, resume=True) == {0}
    assert tree(path) == tree(local)


def test_a_store_that_goes_away_stops_a_reader(bucket: Bucket, uploaded: RemotePath) -> None:
    reader = CacheReader.open(uploaded)
    bucket.stop()
    try:
        with pytest.raises(StoreGoneError, match="cannot be reached"):
            reader.read("valid", np.array([0]))
    finally:
        bucket.start()
    # Nothing of the failure is kept.
    np.testing.assert_array_equal(reader.read_all("valid"), expected("valid"))


@pytest.mark.parametrize("memory", ["ram", "mmap"])
@pytest.mark.parametrize("name", ["hidden/vlm.3/c/1/0/0", "commit/c/1", "valid/c/1"])
def test_a_flipped_bit_is_found_before_the_row_is_used(
    uploaded: RemotePath, name: str, memory: str
) -> None:
    data = bytearray(tree(uploaded)[name])
    data[len(data) // 2] ^= 4
    obstore.put(raw(uploaded), name, bytes(data))
    reader = CacheReader.open(uploaded, memory=memory)
    (problem,) = reader.verify()
    array = name.partition("/c/")[0]
    assert problem.startswith(f"{array} chunk 1 (rows ")
    asked = "hidden/vlm.3" if array == "commit" else array
    with pytest.raises(CraftError, match=f"{array} chunk 1"):
        reader.read(asked, np.array([0, 4]))
    reader.read(asked, np.array([0, 7]))


def test_a_lost_or_short_object_is_found(uploaded: RemotePath) -> None:
    obstore.delete(raw(uploaded), "inputs/image/c/0/0/0/0")
    obstore.put(raw(uploaded), "hidden_mask/c/2/0", b"short")
    problems = CacheReader.open(uploaded).verify()
    assert problems == [
        "inputs/image chunk 0 (rows 0 to 2): the object is missing",
        "hidden_mask chunk 2 (rows 6 to 7): the object has 5 bytes instead of 10",
    ]


def test_chunks_are_fetched_ahead_and_once(
    uploaded: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = CacheReader.open(uploaded, memory="mmap")
    fetched: list[str] = []
    read = RemoteFolder.read

    def counted(self: RemoteFolder, name: str) -> bytes | None:
        fetched.append(name)
        return read(self, name)

    monkeypatch.setattr(RemoteFolder, "read", counted)
    rows = np.array([0, 6, 7])
    reader.prefetch(rows, ["hidden/vlm.3", "inputs/image"])
    for name in ("hidden/vlm.3", "inputs/image"):
        np.testing.assert_array_equal(reader.read(name, rows), expected(name)[rows])
    chunks = [name for name in fetched if name.startswith(("hidden", "inputs"))]
    assert sorted(chunks) == sorted(
        [f"hidden/vlm.3/c/{chunk}/0/0" for chunk in (0, 2)]
        + [f"inputs/image/c/{chunk}/0/0/0" for chunk in (0, 2)]
    )


def test_few_chunks_are_kept_when_memory_is_short(
    uploaded: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("craftcli.cache.reader.free_bytes", lambda: 0)
    reader = CacheReader.open(uploaded)
    assert reader.memory == "mmap"
    rows = np.array([7, 0, 4, 7, 1])
    for _ in range(2):
        read = reader.read("hidden/vlm.3", rows)
        np.testing.assert_array_equal(read, expected("hidden/vlm.3")[rows])
    assert len(reader._rows["hidden/vlm.3"]._kept) == 1  # type: ignore[attr-defined]


def test_a_cache_that_is_replaced_under_a_reader_is_noticed(uploaded: RemotePath) -> None:
    reader = CacheReader.open(uploaded)
    build(uploaded, make_begun(seed=7), overwrite=True)
    with pytest.raises(CraftError, match="replaced or removed"):
        reader.read("valid", np.array([0]))


def test_nothing_there_and_no_such_bucket(path: RemotePath, bucket: Bucket) -> None:
    with pytest.raises(CraftError, match="nothing is there"):
        CacheReader.open(path)
    with pytest.raises(StoreGoneError, match="cannot be reached"):
        build(RemotePath("s3://nobodys-bucket/a.zarr"))


@pytest.mark.parametrize("url", ["s3://bucket", "s3://", "ftp://host/a.zarr"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(CraftError, match="not a place for a cache") as refused:
        locate(url)
    assert refused.value.exit_code == EXIT_USAGE


def test_a_url_is_known_also_as_a_path() -> None:
    assert locate("s3://bucket/a/") == RemotePath("s3://bucket/a")
    assert locate(Path("s3://bucket/a")) == RemotePath("s3://bucket/a")
    assert locate("a/b.zarr") == Path("a/b.zarr")
    assert RemotePath("gs://bucket/a.zarr").name == "a.zarr"


def test_the_extra_is_named_when_it_is_missing(
    path: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(CraftError, match="not installed") as refused:
        CacheReader.open(path)
    assert "craftcli[remote]" in refused.value.fix
    assert refused.value.exit_code == EXIT_USAGE


def test_the_hub_is_reached_through_fsspec(monkeypatch: pytest.MonkeyPatch, local: Path) -> None:
    """Nothing here may reach the Hub: fsspec's own memory stands for it, behind the same store."""
    from zarr.storage import FsspecStore

    name = uuid.uuid4().hex
    monkeypatch.setattr(
        remote, "_hub_store", lambda url: FsspecStore.from_url(f"memory://{name}/a.zarr")
    )
    path = RemotePath(f"hf://datasets/me/{name}/a.zarr")
    with pytest.raises(StoppedError):
        build(path, before_chunk=stop_before(2))
    assert build(path, resume=True) == {0, 1}
    folder = RemoteFolder(path)
    assert {file: folder.read(file) for file in folder.names()} == tree(local)
    reader = CacheReader.open(path)
    assert reader.verify() == []
    assert reader.modified().tzinfo is not None
    build(path, overwrite=True)


def test_the_commands_take_urls(
    craft: Callable[..., Any], cache: Path, path: RemotePath, tmp_path: Path
) -> None:
    small = ("--samples", "32", "--images", "embed", "--device", "cpu")
    built = craft("cache", "build", "-o", path, *small, "--json")
    assert built.exit_code == 0, built.output
    assert json.loads(built.stdout)["path"] == str(path)
    assert tree(path) == tree(cache)
    shown = craft("cache", "inspect", path, "--verify", "--verify-rows", "2", "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["verified"]
    exported = craft("cache", "export", path)
    assert exported.exit_code == 0, exported.output
    assert (tmp_path / "a.safetensors").exists()
    again = craft("cache", "build", "-o", path, *small)
    assert again.exit_code == 1
    assert "--overwrite" in again.stderr
    name = "inputs/observation.state/c/0/0"
    name = name if name in tree(path) else "valid/c/0"
    data = bytearray(tree(path)[name])
    data[0] ^= 1
    obstore.put(raw(path), name, bytes(data))
    spoiled = craft("cache", "inspect", path, "--verify")
    assert spoiled.exit_code == EXIT_CHECK_FAILED
    assert "the checksum does not match" in spoiled.stderr
    wrong = craft("cache", "inspect", "ftp://host/a.zarr")
    assert wrong.exit_code == EXIT_USAGE


def test_training_reads_from_a_url(
    craft: Callable[..., Any], build: Callable[..., Any], path: RemotePath, cache: Path
) -> None:
    build(path)
    short = ("--steps", "3", "--log-every", "1", "--device", "cpu", "--json")
    for name, at in (("a", path), ("b", cache)):
        run = craft("train", "--cache", at, "-o", name, *short)
        assert run.exit_code == 0, run.output
    metrics = [Path(name, "metrics.jsonl").read_text().splitlines() for name in ("a", "b")]
    losses = [[json.loads(line)["loss"] for line in lines] for lines in metrics]
    assert losses[0] == losses[1]
