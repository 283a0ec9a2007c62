"""Files and folders that appear whole or not at all, and what stays when writing them fails."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from craftcli import whole_files
from craftcli.whole_files import (
    move_folder,
    remove_leftovers,
    set_aside,
    temporary_sibling,
    whole_file,
    whole_folder,
    write_bytes,
    write_link,
    write_text,
)


class Interrupted(BaseException):
    """Stands for a KeyboardInterrupt, without stopping pytest."""


def listing(folder: Path) -> list[str]:
    """The names in a folder, hidden ones too."""
    return sorted(os.listdir(folder))


def test_text_is_written_as_utf_8(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "λ\n")
    assert (tmp_path / "a.json").read_bytes() == b"\xce\xbb\n"
    assert listing(tmp_path) == ["a.json"]


def test_a_file_is_replaced(tmp_path: Path) -> None:
    for data in (b"old and longer", b"new"):
        write_bytes(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == b"new"
    assert listing(tmp_path) == ["a"]


def test_until_the_end_the_old_file_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with whole_file(tmp_path / "a") as file:
        file.write(b"new")
        file.flush()
        assert (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize("error", [OSError, Interrupted])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(error), whole_file(tmp_path / "a") as file:  # noqa: PT012 (the block fails)
        file.write(b"half")
        raise error
    assert (tmp_path / "a").read_text() == "old"
    assert listing(tmp_path) == ["a"]


def test_a_destination_that_cannot_be_replaced_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_bytes(tmp_path / "a", b"new")
    assert listing(tmp_path) == ["a"]


def test_the_mode_of_a_file_and_a_folder_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "a", b"")
        with whole_folder(tmp_path / "b"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o750


def test_a_link_at_the_destination_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "a").symlink_to("mine")
    write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "a").is_symlink()


def write_folder(path: Path) -> None:
    """Write a folder with one file."""
    with whole_folder(path) as folder:
        (folder / "f").write_text("new")


@pytest.mark.parametrize(
    "write", [partial(write_bytes, data=b"new"), partial(write_link, target="new"), write_folder]
)
def test_a_link_at_the_temporary_name_is_never_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "guessed").symlink_to("mine")
    monkeypatch.setattr(whole_files, "temporary_sibling", lambda path: tmp_path / "guessed")
    with pytest.raises(FileExistsError):
        write(tmp_path / "a")
    assert (tmp_path / "mine").read_text() == "mine"
    assert "a" not in listing(tmp_path)


def test_two_temporary_names_differ_and_lie_beside_the_file(tmp_path: Path) -> None:
    one, other = (temporary_sibling(tmp_path / "a") for _ in range(2))
    assert one != other
    assert one.parent == tmp_path
    assert one.name.startswith(".a.")
    assert listing(tmp_path) == []


def test_a_link_is_pointed_elsewhere(tmp_path: Path) -> None:
    for target in ("one", "two"):
        write_link(tmp_path / "last", target)
        assert os.readlink(tmp_path / "last") == target
    assert listing(tmp_path) == ["last"]


def test_a_link_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()
    with pytest.raises(IsADirectoryError):
        write_link(tmp_path / "last", "one")
    assert listing(tmp_path) == ["last"]


def test_a_folder_appears_at_the_end_with_its_parents(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "up/a") as folder:
        (folder / "f").write_text("new")
        assert not (tmp_path / "up/a").exists()
    assert (tmp_path / "up/a/f").read_text() == "new"
    assert listing(tmp_path / "up") == ["a"]


def test_a_block_may_create_the_folder_itself(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "a", create=False) as folder:
        assert not folder.exists()
        folder.mkdir()
    assert listing(tmp_path) == ["a"]


def test_a_folder_that_exists_is_kept_unless_it_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/f").write_text("old")
    with pytest.raises(FileExistsError), whole_folder(tmp_path / "a"):
        pass
    assert (tmp_path / "a/f").read_text() == "old"
    assert listing(tmp_path) == ["a"]
    with whole_folder(tmp_path / "a", replace=True) as folder:
        (folder / "g").write_text("new")
    assert listing(tmp_path / "a") == ["g"]
    assert listing(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [OSError, Interrupted])
def test_a_failed_folder_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/f").write_text("old")
    with (  # noqa: PT012 (the block fails)
        pytest.raises(error),
        whole_folder(tmp_path / "a", replace=True) as folder,
    ):
        (folder / "g").write_text("half")
        raise error
    assert listing(tmp_path / "a") == ["f"]
    assert listing(tmp_path) == ["a"]


def test_a_move_that_fails_puts_the_old_folder_back(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/f").write_text("old")
    with pytest.raises(FileNotFoundError):
        move_folder(tmp_path / "missing", tmp_path / "a", replace=True)
    assert (tmp_path / "a/f").read_text() == "old"
    assert listing(tmp_path) == ["a"]


def test_a_link_to_a_folder_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/f").write_text("mine")
    (tmp_path / "a").symlink_to("mine")
    with whole_folder(tmp_path / "a", replace=True):
        pass
    assert (tmp_path / "mine/f").read_text() == "mine"
    assert listing(tmp_path) == ["a", "mine"]


def test_what_is_set_aside_stays_there_when_the_block_succeeds(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with set_aside(tmp_path / "a", tmp_path / "b"):
        (tmp_path / "a").write_text("new")
    assert (tmp_path / "b").read_text() == "old"


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    path, mine = tmp_path / "a", tmp_path / "mine"
    mine.mkdir()
    temporary_sibling(path).write_text("half")
    temporary_sibling(path, ".replaced").mkdir()
    (temporary_sibling(path, ".replaced") / "in").mkdir(parents=True)
    temporary_sibling(path).symlink_to("mine")
    kept = [
        "a",
        "a.partial",
        ".a.partial",
        ".a.0123.partial",
        temporary_sibling(tmp_path / "b").name,
    ]
    for name in kept:
        (tmp_path / name).write_text("mine")
    remove_leftovers(path)
    assert listing(tmp_path) == sorted([*kept, "mine"])


def test_leftovers_of_a_folder_that_is_not_there_are_none(tmp_path: Path) -> None:
    remove_leftovers(tmp_path / "missing/a")
    assert listing(tmp_path) == []


def test_a_file_that_is_being_written_is_not_left_over(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a") as file:
        remove_leftovers(tmp_path / "a")
        file.write(b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_file_that_another_process_is_writing_is_not_left_over(tmp_path: Path) -> None:
    code = """
import sys, pathlib
from craftcli.whole_files import whole_file
with whole_file(pathlib.Path(sys.argv[1])) as file:
    print("open", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "open\n"
        remove_leftovers(tmp_path / "a")
        assert len(listing(tmp_path)) == 1
        other.kill()
    remove_leftovers(tmp_path / "a")
    assert listing(tmp_path) == []
