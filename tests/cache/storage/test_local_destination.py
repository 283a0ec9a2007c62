import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from craftcli.cache.storage.local_destination import (
    LocalDestination,
    is_craft_cache,
    missing_cache_error,
)
from craftcli.cache.storage.local_folder import explain_full_disk, sync_files
from craftcli.errors import EXIT_USAGE, CraftError

REPLACED = ".a.zarr.0123456789abcdef.replaced"
"""A name of a cache that is being replaced."""


def fill(folder: Path, content: str) -> None:
    """What makes a folder a cache here: the mark, and some data below."""
    (folder / "data/c").mkdir(parents=True)
    (folder / "data/c/0").write_text(content)
    (folder / "zarr.json").write_text(json.dumps({"attributes": {"craft": {}}}))


def build(path: Path, content: str = "new", *, overwrite: bool = False) -> None:
    destination = LocalDestination(path)
    destination.prepare(overwrite=overwrite, resume=False)
    fill(destination.folder.path, content)
    destination.publish(overwrite=overwrite)


def prepare(path: Path, *, overwrite: bool = False, resume: bool = False) -> Path:
    """The build folder, after what was there was checked."""
    destination = LocalDestination(path)
    destination.prepare(overwrite=overwrite, resume=resume)
    return destination.folder.path


def check(path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """Check a path before a build."""
    LocalDestination(path).check(overwrite=overwrite, resume=resume)


def content(path: Path) -> str:
    return (path / "data/c/0").read_text()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "a.zarr"
    fill(path, "old")
    return path


def test_an_existing_cache_is_replaced_only_when_asked(place: Path) -> None:
    before = tree(place.parent)
    with pytest.raises(CraftError, match="--overwrite"):
        build(place)
    assert tree(place.parent) == before
    build(place, overwrite=True)
    assert content(place) == "new"
    assert os.listdir(place.parent) == [place.name]


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("kind", ["folder", "empty", "group", "json", "file", "link"])
def test_what_is_not_a_cache_is_never_replaced(tmp_path: Path, kind: str, overwrite: bool) -> None:
    path = tmp_path / "precious"
    metadata = {"group": '{"attributes": {"title": "mine"}}', "json": "[]", "folder": "not json"}
    if kind == "file":
        path.write_text("me")
    elif kind == "link":
        (tmp_path / "home").mkdir()
        path.symlink_to(tmp_path / "home")
    else:
        path.mkdir()
    if kind in metadata:
        (path / "zarr.json").write_text(metadata[kind])
    before = sorted(os.listdir(tmp_path)), tree(tmp_path)
    assert not is_craft_cache(path)
    with pytest.raises(CraftError, match="not a craft cache"):
        LocalDestination(path).check_free(overwrite=overwrite)
    with pytest.raises(CraftError, match="not a craft cache"):
        build(path, overwrite=overwrite)
    assert (sorted(os.listdir(tmp_path)), tree(tmp_path)) == before


def test_a_link_is_followed_even_to_a_path_without_a_cache(tmp_path: Path) -> None:
    (tmp_path / "other-disk").mkdir()
    link = tmp_path / "a.zarr"
    link.symlink_to(tmp_path / "other-disk/a.zarr")
    build(link)
    assert link.is_symlink()
    assert content(tmp_path / "other-disk/a.zarr") == "new"
    assert os.listdir(tmp_path / "other-disk") == ["a.zarr"]


@pytest.mark.parametrize(
    "kind", ["folder", "cache with notes", "cache with notes.partial", "group", "file", "link"]
)
def test_something_foreign_in_the_way_is_not_removed(tmp_path: Path, kind: str) -> None:
    leftover = tmp_path / "a.zarr.partial"
    if kind == "folder":
        leftover.mkdir()
        (leftover / "notes.txt").write_text("mine")
    elif kind == "cache with notes":
        fill(leftover, "half")
        (leftover / "data/notes.txt").write_text("mine")
    elif kind == "cache with notes.partial":
        fill(leftover, "half")
        (leftover / "notes.partial").write_text("mine")
    elif kind == "group":
        fill(leftover, "mine")
        (leftover / "zarr.json").write_text('{"attributes": {}}')
    elif kind == "file":
        leftover.write_text("mine")
    else:
        # Even a link to a cache: no build makes links.
        fill(tmp_path / "other.zarr", "mine")
        leftover.symlink_to(tmp_path / "other.zarr")
    before = tree(tmp_path)
    with pytest.raises(CraftError, match="Refusing to overwrite"):
        build(tmp_path / "a.zarr")
    assert tree(tmp_path) == before
    assert os.path.lexists(leftover)


@pytest.mark.parametrize("name", ["a.zarr.partial", REPLACED])
@pytest.mark.parametrize("left", [None, "zarr.0123abcd.partial", "commit/zarr.json", "valid/c/0"])
def test_what_a_kill_in_the_first_or_last_instant_leaves_is_taken_over(
    tmp_path: Path, name: str, left: str | None
) -> None:
    leftover = tmp_path / name
    leftover.mkdir()
    if left:
        (leftover / left).parent.mkdir(parents=True, exist_ok=True)
        (leftover / left).write_text("{")
    build(tmp_path / "a.zarr")
    assert os.listdir(tmp_path) == ["a.zarr"]


@pytest.mark.parametrize("name", ["notes.txt", "data/notes.txt", "data/c/notes", "mine/zarr.json"])
def test_a_cache_with_files_of_the_user_is_not_replaced(place: Path, name: str) -> None:
    metadata: dict[str, Any] = {"attributes": {"craft": {}, "arrays": {"data": {}}}}
    (place / "zarr.json").write_text(json.dumps(metadata))
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text("mine")
    before = tree(place.parent)
    for refuse in (build, check):
        with pytest.raises(CraftError, match=f"files that craft did not write.* {name} would"):
            refuse(place, overwrite=True)
        assert tree(place.parent) == before


def test_a_linked_part_of_a_cache_is_neither_followed_nor_removed(place: Path) -> None:
    other = place.with_name("other")
    shutil.move(place / "data", other)
    (place / "data").symlink_to(other)
    with pytest.raises(CraftError, match="data would be lost"):
        build(place, overwrite=True)
    assert (other / "c/0").read_text() == "old"


def test_a_cache_of_the_user_called_replaced_stays(place: Path) -> None:
    mine = place.with_name("a.zarr.replaced")
    fill(mine, "mine")
    build(place, overwrite=True)
    assert content(mine) == "mine"
    assert content(place) == "new"


def test_a_killed_build_is_cleared_away(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    fill(prepare(path), "half")
    assert "half-built" in missing_cache_error(path).why
    assert list(prepare(path).iterdir()) == []


def kill_build(path: Path, committed: int) -> Path:
    """A killed build of a cache of 10 rows in 4 chunks."""
    partial = prepare(path)
    fill(partial, "half")
    manifest = {"rows": 10, "rows_per_chunk": 3}
    (partial / "zarr.json").write_text(json.dumps({"attributes": {"craft": manifest}}))
    (partial / "commit/c").mkdir(parents=True)
    (partial / "commit/c/3.0123abcd.partial").write_text("")
    for chunk in range(committed):
        (partial / f"commit/c/{chunk}").write_text("")
    return partial


def test_committed_chunks_of_a_killed_build_stay_until_someone_decides(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    partial = kill_build(path, committed=2)
    destination = LocalDestination(path)
    assert str(destination.interrupted_build()) == f"2 of 4 chunks in {partial}"
    before = tree(tmp_path)
    for refuse in (prepare, check):
        with pytest.raises(CraftError, match=r"2 of 4 chunks.*--resume.*--overwrite"):
            refuse(path)
    check(path, resume=True)
    check(path, overwrite=True)
    assert destination.prepare(overwrite=False, resume=True)
    assert tree(tmp_path) == before
    assert not destination.prepare(overwrite=True, resume=False)
    assert list(partial.iterdir()) == []


@pytest.mark.parametrize("resume", [True, False])
def test_a_killed_build_without_a_committed_chunk_is_cleared_away(
    tmp_path: Path, resume: bool
) -> None:
    path = tmp_path / "a.zarr"
    kill_build(path, committed=0)
    assert LocalDestination(path).interrupted_build() is None
    check(path, resume=resume)
    assert list(prepare(path, resume=resume).iterdir()) == []


def test_a_folder_without_rights_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "not/yet/a.zarr"
    check(path)
    # Permission bits do not stop root, as whom tests often run.
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)
    with pytest.raises(CraftError, match=f"{tmp_path} cannot be written by you"):
        check(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CraftError, match="file is not a folder"):
        check(tmp_path / "file/a.zarr")


def test_an_overwrite_killed_between_its_moves_is_undone(place: Path) -> None:
    aside = place.with_name(REPLACED)
    place.rename(aside)
    assert str(aside) in missing_cache_error(place).why
    with pytest.raises(CraftError, match="--overwrite"):
        build(place)
    assert content(place) == "old"
    shutil.copytree(place, aside)
    build(place, overwrite=True)
    assert content(place) == "new"
    assert os.listdir(place.parent) == [place.name]


def test_a_failed_move_brings_the_old_cache_back(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = tree(place), Path.rename

    def fail_on_partial(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "broken disk")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_on_partial)
    with pytest.raises(OSError, match="broken disk"):
        build(place, overwrite=True)
    assert tree(place) == before


def test_a_removal_that_fails_half_way_leaves_a_known_cache(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = Path.rmdir

    def fail_on_the_rest(folder: Path) -> None:
        if folder.name == "data":
            raise OSError(errno.EIO, "broken disk")
        remove(folder)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", fail_on_the_rest)
        build(place, overwrite=True)
    (aside,) = (entry for entry in place.parent.iterdir() if entry != place)
    assert sorted(os.listdir(aside)) == ["data", "zarr.json"]
    assert content(place) == "new"
    build(place, "newer", overwrite=True)
    assert os.listdir(place.parent) == [place.name]


def test_removing_what_is_gone_is_no_error(tmp_path: Path) -> None:
    LocalDestination(tmp_path / "nothing").abandon()


def test_the_root_of_a_disk_is_refused() -> None:
    """As the output of every command that writes a cache."""
    with pytest.raises(CraftError, match="root of a disk") as refused:
        LocalDestination(Path("/"))
    assert refused.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize("parent", ["file", "file/deeper"])
def test_a_parent_that_is_a_file_is_refused(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CraftError, match="Cannot write"):
        prepare(tmp_path / parent / "a.zarr")


def test_an_unwritable_parent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    # Permission bits do not stop root, as whom tests often run.
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CraftError, match="Permission denied"):
        prepare(tmp_path / "a.zarr")


def test_missing_parents_are_made(tmp_path: Path) -> None:
    build(tmp_path / "x/y/a.zarr")
    assert is_craft_cache(tmp_path / "x/y/a.zarr")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(tmp_path: Path, code: int) -> None:
    with (
        pytest.raises(CraftError, match=r"needs 2\.50 GB in all; the disk at /"),
        explain_full_disk(tmp_path / "a.zarr", need=2_500_000_000),
    ):
        raise OSError(code, os.strerror(code))


def test_other_errors_are_not_a_full_disk(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="broken disk"),
        explain_full_disk(tmp_path / "a.zarr", need=1),
    ):
        raise OSError(errno.EIO, "broken disk")


def test_sync_reaches_files_and_the_folders_above_them(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: dict[int, Path] = {}
    synced: list[Path] = []
    real_open = os.open

    def remember(path: Path, flags: int) -> int:
        descriptor = real_open(path, flags)
        opened[descriptor] = path
        return descriptor

    monkeypatch.setattr(os, "open", remember)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(opened[descriptor]))
    sync_files(place, [place / "data/c/0"])
    assert sorted(synced) == [place, place / "data", place / "data/c", place / "data/c/0"]
