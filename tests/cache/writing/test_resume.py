"""Builds that break off: what is kept, what is done again, and that the bytes are the same."""

import asyncio
import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made.files import tree
from made.manifests import TEACHER, make_manifest
from made.rows import rows_of_chunk
from zarr.storage import LocalStore

from craftcli.cache.format import Manifest
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.local_destination import LocalDestination
from craftcli.cache.storage.local_lock import LocalLock
from craftcli.cache.storage.zarr_layout import required_arrays
from craftcli.cache.writing import writer as writer_module
from craftcli.cache.writing.unfinished import Resumable, UnfinishedCache
from craftcli.cache.writing.writer import CacheWriter
from craftcli.distributed import Processes
from craftcli.errors import CraftError

CHUNKS = 4
TASKS = ["push the cube", "öffne die Tür"]
OTHER = replace(TEACHER, weights_digest="x")
INPUTS = {"inputs/image": ArraySpec(shape=(3, 2, 2), dtype="uint8")}

# The last chunk is not full, and one of the layers is packed.
make_begun = functools.partial(
    make_manifest,
    complete=False,
    rows=CHUNKS * 3 - 1,
    rows_per_chunk=3,
    packed=("hidden/vlm.3",),
    versions={"torch": "2.10"},
)


class StoppedError(Exception):
    """What breaks a build off."""


def build(
    path: Path,
    *,
    manifest: Manifest | None = None,
    stop_before: int | None = None,
    error: type[BaseException] = StoppedError,
    resume: bool = False,
    overwrite: bool = False,
    tasks: list[str] = TASKS,
    arrays: dict[str, ArraySpec] = INPUTS,
    batch_size: int = 8,
) -> set[int]:
    """Build a cache, or break off before a chunk; the chunks that were reused."""
    manifest = manifest or make_begun()
    every = required_arrays(manifest) | arrays
    with CacheWriter.create(
        path,
        manifest,
        every,
        tasks=tasks,
        overwrite=overwrite,
        resumable=Resumable(resume=resume, settings={"batch_size": batch_size}),
    ) as writer:
        for chunk in range(manifest.chunk_count):
            if chunk == stop_before:
                raise error
            if chunk not in writer.reused:
                writer.write_chunk(chunk, rows_of_chunk(manifest, every, chunk))
        writer.finish()
    return set(writer.reused)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes | None]:
    path = tmp_path_factory.mktemp("undisturbed") / "a.zarr"
    assert build(path) == set()
    assert "build.json" not in os.listdir(path)
    return tree(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.zarr"


@pytest.fixture
def partial(path: Path) -> Path:
    """A build that broke off with all chunks but the last committed."""
    with pytest.raises(StoppedError):
        build(path, stop_before=CHUNKS - 1)
    return path.with_name("a.zarr.partial")


@pytest.mark.parametrize("error", [StoppedError, KeyboardInterrupt])
@pytest.mark.parametrize("committed", range(CHUNKS + 1))
def test_a_build_that_breaks_off_is_continued_to_the_same_bytes(
    path: Path, undisturbed: Any, committed: int, error: type[BaseException]
) -> None:
    if committed < CHUNKS:
        with pytest.raises(error):
            build(path, stop_before=committed, error=error)
        assert os.listdir(path.parent) == (["a.zarr.partial"] if committed else [])
    reused = build(path, resume=True)
    assert reused == set(range(committed % CHUNKS))
    assert tree(path) == undisturbed
    assert os.listdir(path.parent) == ["a.zarr"]


def test_what_was_committed_is_not_thrown_away_unasked(
    path: Path, partial: Path, undisturbed: Any
) -> None:
    before = tree(partial)
    with pytest.raises(CraftError, match=r"a\.zarr is half-built") as caught:
        build(path)
    assert "committed 3 of 4 chunks in " in caught.value.why
    assert "--resume" in caught.value.fix
    assert "--overwrite" in caught.value.fix
    assert tree(path.parent) == {"a.zarr.partial": None} | {
        f"a.zarr.partial/{name}": content for name, content in before.items()
    }
    assert build(path, overwrite=True) == set()
    assert tree(path) == undisturbed


def test_overwrite_and_resume_together_replace_the_cache_by_the_continued_build(
    path: Path, undisturbed: Any
) -> None:
    build(path, manifest=make_begun(seed=9))
    with pytest.raises(StoppedError):
        build(path, stop_before=2, overwrite=True)
    assert CacheReader.open(path).manifest.seed == 9
    with pytest.raises(CraftError, match="already exists"):
        build(path, resume=True)
    assert build(path, resume=True, overwrite=True) == {0, 1}
    assert tree(path) == undisturbed


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def swap(file: Path) -> None:
    """Put the file of another chunk there, which is whole but not the right one."""
    parts = list(file.parts)
    chunk = parts.index("c") + 1
    parts[chunk] = "0" if parts[chunk] == "1" else "1"
    shutil.copy(Path(*parts), file)


@pytest.mark.parametrize("damage", [flip, truncate, empty, swap, Path.unlink])
@pytest.mark.parametrize("file", ["hidden/vlm.3/c/1/0/0", "index/frame/c/1", "commit/c/1"])
def test_a_torn_chunk_is_done_again(
    path: Path, partial: Path, undisturbed: Any, damage: Callable[[Path], None], file: str
) -> None:
    damage(partial / file)
    assert (partial / file).is_file() is (damage is not Path.unlink)
    assert build(path, resume=True) == {0, 2}
    assert tree(path) == undisturbed


def test_a_torn_file_of_the_padded_last_chunk_is_replaced(path: Path, undisturbed: Any) -> None:
    with pytest.raises(StoppedError):
        build_and_stop_in_finish(path)
    truncate(path.with_name("a.zarr.partial") / f"inputs/image/c/{CHUNKS - 1}/0/0/0")
    assert build(path, resume=True) == {0, 1, 2}
    assert tree(path) == undisturbed


def build_and_stop_in_finish(path: Path, step: str = "update_manifest") -> None:
    """Break off just before a step of `finish`."""

    def stop(*_: Any, **__: Any) -> None:
        raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        owners = {"remove_settings": UnfinishedCache, "publish": LocalDestination}
        owner: Any = owners.get(step, writer_module)
        patch.setattr(owner, step, stop)
        build(path)


@pytest.mark.parametrize(
    "step", ["stats_chunks", "metadata_files", "remove_settings", "update_manifest", "publish"]
)
def test_a_build_that_breaks_off_while_it_finishes_is_continued(
    path: Path, undisturbed: Any, step: str
) -> None:
    with pytest.raises(StoppedError):
        build_and_stop_in_finish(path, step)
    assert build(path, resume=True) == set(range(CHUNKS))
    assert tree(path) == undisturbed


def test_what_a_kill_leaves_beside_the_chunks_is_removed(
    path: Path, partial: Path, undisturbed: Any
) -> None:
    for name in ("zarr", "valid/zarr", "valid/c/3", "inputs/image/c/0/0/0/0", "commit/c/3"):
        leftover = partial / f"{name}.0123456789abcdef.partial"
        leftover.parent.mkdir(parents=True, exist_ok=True)
        leftover.write_bytes(b"half")
    (partial / "stats/vlm.2/mean").mkdir(parents=True)
    (partial / "stats/vlm.2/mean/zarr.json").write_text("{")
    build(path, resume=True)
    assert tree(path) == undisturbed


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"manifest": make_begun(seed=1)}, "of seed."),
        ({"manifest": make_begun(teacher=OTHER)}, "teacher.weights_digest"),
        ({"manifest": make_begun(versions={"torch": "2.11"})}, "of versions.torch."),
        ({"manifest": make_begun(rows_per_chunk=2)}, "of rows_per_chunk."),
        ({"manifest": make_begun(pooling="cls", seed=1)}, "of pooling, seed."),
        ({"tasks": ["push the cube", "close the door"]}, "of tasks."),
        ({"arrays": {}}, "arrays.inputs/image.shape"),
        ({"batch_size": 9}, "of batch_size."),
    ],
)
def test_another_build_is_not_continued(
    path: Path, partial: Path, change: dict[str, Any], field: str
) -> None:
    before = tree(partial)
    with pytest.raises(CraftError, match="Cannot resume the build") as caught:
        build(path, resume=True, **change)
    assert field in caught.value.why
    assert "--overwrite" in caught.value.fix
    assert tree(partial) == before
    assert os.listdir(path.parent) == ["a.zarr.partial"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_what_is_committed(
    path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real, calls = CacheWriter.write_chunk, []

    def full_at_the_third(self: CacheWriter, chunk: int, rows: Any) -> None:
        def full(descriptor: int) -> None:
            calls.append(descriptor)
            raise OSError(code, os.strerror(code))

        with pytest.MonkeyPatch.context() as patch:
            if chunk == 2:
                patch.setattr(os, "fsync", full)
            real(self, chunk, rows)

    with monkeypatch.context() as patch:
        patch.setattr(CacheWriter, "write_chunk", full_at_the_third)
        with pytest.raises(CraftError, match="The disk is full"):
            build(path)
    assert len(calls) == 1
    assert build(path, resume=True) == {0, 1}
    assert tree(path) == undisturbed


def hold_in_another_process(lock: Path, byte: int) -> subprocess.Popen[str]:
    code = (
        "import fcntl, os, sys, time\n"
        "file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(lock), str(byte)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


@pytest.mark.parametrize("byte", [0, 1])
@pytest.mark.parametrize("option", ["resume", "overwrite"])
def test_two_builds_at_once_do_not_meet(
    path: Path, partial: Path, undisturbed: Any, byte: int, option: str
) -> None:
    """Not even when of the other one only a second process is left, its first one killed."""
    before = tree(partial)
    lock = path.with_name(".a.zarr.craft.lock")
    with hold_in_another_process(lock, byte) as holder:
        with pytest.raises(CraftError, match=r"Another build into .*a\.zarr is running"):
            build(path, resume=option == "resume", overwrite=option == "overwrite")
        assert tree(partial) == before
        holder.kill()
    build(path, resume=option == "resume", overwrite=option == "overwrite")
    assert tree(path) == undisturbed
    assert os.listdir(path.parent) == ["a.zarr"]


def test_two_builds_in_one_process_do_not_meet_either(path: Path, undisturbed: Any) -> None:
    manifest = make_begun()
    arrays = required_arrays(manifest) | INPUTS
    with CacheWriter.create(path, manifest, arrays, tasks=TASKS, overwrite=False):
        with pytest.raises(CraftError, match="Another build"):
            build(path, overwrite=True)
        assert sorted(os.listdir(path.parent)) == [".a.zarr.craft.lock", "a.zarr.partial"]
    build(path)
    assert tree(path) == undisturbed


def test_a_lock_file_that_vanishes_while_it_is_taken_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    removed: list[bool] = []
    real = fcntl.lockf
    file = path.with_name(".a.zarr.craft.lock")

    def remove_first(descriptor: int, *arguments: int) -> Any:
        if not removed:
            removed.append(True)
            file.unlink()
        return real(descriptor, *arguments)

    monkeypatch.setattr(fcntl, "lockf", remove_first)
    lock = LocalLock(path, Processes())
    lock.acquire()
    assert removed
    assert file.exists()
    lock.release()
    assert not file.exists()


def test_a_lock_is_kept_while_other_processes_may_write(path: Path) -> None:
    first = LocalLock(path, Processes(rank=0, world=2))
    first.acquire()
    first.admit()
    first.release()
    assert path.with_name(".a.zarr.craft.lock").exists()
    again = LocalLock(path, Processes(rank=0, world=2))
    again.acquire()
    again.admit()
    again.release(done=True)
    assert not path.with_name(".a.zarr.craft.lock").exists()


def test_no_rights_beside_the_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(file: Any, flags: int, *mode: int) -> int:
        if str(file).endswith(".lock"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return real(file, flags, *mode)

    # Permission bits do not stop root, as whom tests often run.
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CraftError, match="Cannot write") as caught:
        build(path)
    assert "Permission denied" in caught.value.why
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_of_the_user_is_no_lock(path: Path, kind: str) -> None:
    """`-o uv` once opened and removed uv.lock."""
    users = path.with_name("a.zarr.lock")
    users.write_text("mine")
    build(path)
    assert users.read_text() == "mine"
    lock = path.with_name(".a.zarr.craft.lock")
    if kind == "link":
        lock.symlink_to(users)
    else:
        lock.write_text("mine")
    with pytest.raises(CraftError, match=r"Cannot (lock|write)"):
        build(path, overwrite=True)
    assert lock.read_text() == users.read_text() == "mine"


def test_a_disk_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", refuse)
    with pytest.raises(CraftError, match="Cannot lock"):
        build(path)


def test_a_write_without_a_way_to_resume_it_keeps_nothing(path: Path) -> None:
    manifest = make_begun()

    def break_off() -> None:
        arrays = required_arrays(manifest) | INPUTS
        with CacheWriter.create(path, manifest, arrays, tasks=TASKS, overwrite=False) as writer:
            writer.write_chunk(0, rows_of_chunk(manifest, arrays, 0))
            raise StoppedError

    with pytest.raises(StoppedError):
        break_off()
    assert os.listdir(path.parent) == []


# The twenty-first is the first commit record, whose chunk is kept; packed chunks are not counted.
@pytest.mark.parametrize("files", [1, 5, 9, 13, 17, 20])
def test_ctrl_c_while_the_arrays_are_created_leaves_nothing_in_the_way(
    path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    """Zarr's thread goes on writing: it must not do so in a folder that was removed."""
    real, written = LocalStore.set, 0

    async def interrupt_soon(self: Any, key: str, value: Any) -> None:
        nonlocal written
        written += 1
        if written == files:
            # The main thread waits for this one, and is interrupted there.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.sleep(0.05)
        await real(self, key, value)

    monkeypatch.setattr(LocalStore, "set", interrupt_soon)
    # A process that was started in the background may ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            build(path)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    time.sleep(0.1)
    build(path)
    assert tree(path) == undisturbed
    assert os.listdir(path.parent) == ["a.zarr"]


def test_the_settings_of_an_unfinished_build_are_beside_its_rows(partial: Path) -> None:
    assert json.loads((partial / "build.json").read_text()) == {"batch_size": 8}
