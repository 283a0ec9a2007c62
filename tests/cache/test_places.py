import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from craftcli.cache.disk import disk_full, sync
from craftcli.cache.places import (
    check_destination,
    check_place,
    find_unfinished,
    is_craft_cache,
    make_partial,
    missing_cache,
    move_into_place,
    try_remove,
)
from craftcli.errors import CraftError


def fill(folder: Path, content: str) -> None:
    """What makes a folder a cache here: the mark, and some data below."""
    (folder / "data/c").mkdir(parents=True)
    (folder / "data/c/0").write_text(content)
    (folder / "zarr.json").write_text(json.dumps({"attributes": {"craft": {}}}))


def build(path: Path, content: str = "new", *, overwrite: bool = False) -> None:
    partial = make_partial(path, overwrite=overwrite)
    fill(partial, content)
    move_into_place(partial, path)


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
@pytest.mark.parametrize("kind", ["folder", "empty", "group", "json", "file", "link", "loose"])
def test_what_is_not_a_cache_is_never_replaced(tmp_path: Path, kind: str, overwrite: bool) -> None:
    path = tmp_path / "precious"
    metadata = {"group": '{"attributes": {"title": "mine"}}', "json": "[]", "folder": "not json"}
    if kind == "file":
        path.write_text("me")
    elif kind == "link":
        (tmp_path / "home").mkdir()
        path.symlink_to(tmp_path / "home")
    elif kind == "loose":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.mkdir()
    if kind in metadata:
        (path / "zarr.json").write_text(metadata[kind])
    before = sorted(os.listdir(tmp_path)), tree(tmp_path)
    assert not is_craft_cache(path)
    with pytest.raises(CraftError, match="not a craft cache"):
        check_destination(path, overwrite=overwrite)
    with pytest.raises(CraftError, match="not a craft cache"):
        build(path, overwrite=overwrite)
    assert (sorted(os.listdir(tmp_path)), tree(tmp_path)) == before


@pytest.mark.parametrize("suffix", ["partial", "replaced"])
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_something_foreign_in_the_way_is_not_removed(
    tmp_path: Path, suffix: str, kind: str
) -> None:
    leftover = tmp_path / f"a.zarr.{suffix}"
    if kind == "folder":
        leftover.mkdir()
        (leftover / "notes.txt").write_text("mine")
    elif kind == "file":
        leftover.write_text("mine")
    else:
        # Even a link to a cache: no build makes links.
        fill(tmp_path / "other.zarr", "mine")
        leftover.symlink_to(tmp_path / "other.zarr")
    before = tree(tmp_path)
    with pytest.raises(CraftError, match="is in the way"):
        build(tmp_path / "a.zarr")
    assert tree(tmp_path) == before
    assert os.path.lexists(leftover)


@pytest.mark.parametrize("suffix", ["partial", "replaced"])
@pytest.mark.parametrize("temporary", [True, False])
def test_an_empty_leftover_folder_is_taken_over(
    tmp_path: Path, suffix: str, temporary: bool
) -> None:
    leftover = tmp_path / f"a.zarr.{suffix}"
    leftover.mkdir()
    if temporary:
        (leftover / "zarr.0123abcd.partial").write_text("{")
    build(tmp_path / "a.zarr")
    assert os.listdir(tmp_path) == ["a.zarr"]


def test_a_killed_build_is_cleared_away(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    fill(make_partial(path, overwrite=False), "half")
    assert "half-built" in missing_cache(path).why
    assert list(make_partial(path, overwrite=False).iterdir()) == []


def begin(path: Path, committed: int) -> Path:
    """A killed build of a cache of 10 rows in 4 chunks."""
    partial = make_partial(path, overwrite=False)
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
    partial = begin(path, committed=2)
    assert str(find_unfinished(path)) == f"2 of 4 chunks in {partial}"
    before = tree(tmp_path)
    for refuse in (
        make_partial,
        lambda p, overwrite: check_place(p, overwrite=False, resume=False),
    ):
        with pytest.raises(CraftError, match=r"2 of 4 chunks.*--resume.*--overwrite"):
            refuse(path, overwrite=False)
    check_place(path, overwrite=False, resume=True)
    check_place(path, overwrite=True, resume=False)
    assert make_partial(path, overwrite=False, resume=True) == partial
    assert tree(tmp_path) == before
    assert list(make_partial(path, overwrite=True).iterdir()) == []


@pytest.mark.parametrize("resume", [True, False])
def test_a_killed_build_without_a_committed_chunk_is_cleared_away(
    tmp_path: Path, resume: bool
) -> None:
    path = tmp_path / "a.zarr"
    begin(path, committed=0)
    assert find_unfinished(path) is None
    check_place(path, overwrite=False, resume=resume)
    assert list(make_partial(path, overwrite=False, resume=resume).iterdir()) == []


def test_a_folder_without_rights_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "not/yet/a.zarr"
    check_place(path, overwrite=False, resume=False)
    # Permission bits do not stop root, as whom tests often run.
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)
    with pytest.raises(CraftError, match=f"{tmp_path} cannot be written by you"):
        check_place(path, overwrite=False, resume=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(CraftError, match="file is not a folder"):
        check_place(tmp_path / "file/a.zarr", overwrite=False, resume=False)


def test_an_overwrite_killed_between_its_moves_is_undone(place: Path) -> None:
    aside = place.with_name("a.zarr.replaced")
    place.rename(aside)
    assert str(aside) in missing_cache(place).why
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
    aside, remove = place.with_name("a.zarr.replaced"), shutil.rmtree

    def fail_on_the_rest(folder: Path) -> None:
        if folder.name == aside.name:
            raise OSError(errno.EIO, "broken disk")
        remove(folder)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail_on_the_rest)
        build(place, overwrite=True)
    assert os.listdir(aside) == ["zarr.json"]
    assert content(place) == "new"
    build(place, "newer", overwrite=True)
    assert os.listdir(place.parent) == [place.name]


def test_removing_what_is_gone_is_no_error(tmp_path: Path) -> None:
    try_remove(tmp_path / "nothing")


@pytest.mark.parametrize("parent", ["file", "file/deeper"])
def test_a_parent_that_is_a_file_is_refused(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CraftError, match="Cannot write"):
        make_partial(tmp_path / parent / "a.zarr", overwrite=False)


def test_an_unwritable_parent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    # Permission bits do not stop root, as whom tests often run.
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CraftError, match="Permission denied"):
        make_partial(tmp_path / "a.zarr", overwrite=False)


def test_missing_parents_are_made(tmp_path: Path) -> None:
    build(tmp_path / "x/y/a.zarr")
    assert is_craft_cache(tmp_path / "x/y/a.zarr")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(tmp_path: Path, code: int) -> None:
    with (
        pytest.raises(CraftError, match=r"needs 2\.50 GB in all; the disk at /"),
        disk_full(tmp_path / "a.zarr", need=2_500_000_000),
    ):
        raise OSError(code, os.strerror(code))


def test_other_errors_are_not_a_full_disk(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="broken disk"),
        disk_full(tmp_path / "a.zarr", need=1),
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
    sync(place, [place / "data/c/0"])
    assert sorted(synced) == [place, place / "data", place / "data/c", place / "data/c/0"]
