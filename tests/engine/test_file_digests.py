"""Digests of the content of files: whole ones, and parts of large ones."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from craftcli.engine import file_digests
from craftcli.engine.file_digests import (
    PART_BYTES,
    PARTS,
    differences,
    digest_contents,
    file_digest,
    read_in_parts,
)

LARGE = 3 * PARTS * PART_BYTES


def write(folder: Path, **sizes: int) -> dict[str, Path]:
    """Files without blocks on disk: holes read as zeros."""
    for name, size in sizes.items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
    return {name: folder / name for name in sizes}


def put(file: Path, where: int) -> None:
    """Change one byte, and nothing that a listing of the folder shows."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(where)
        opened.write(b"x")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read whole."""
    found: list[Path] = []

    def note(file: Path) -> str:
        found.append(file)
        return file_digest(file)

    monkeypatch.setattr(file_digests, "file_digest", note)
    return found


def test_every_byte_counts(tmp_path: Path) -> None:
    files = write(tmp_path, a=5000, b=5000, c=0)
    before = digest_contents(files)
    put(files["b"], 2500)
    assert differences(before, digest_contents(files)) == ["b has changed"]
    assert before["a"] == file_digest(files["a"])
    assert read_in_parts(before) == []


def test_files_that_are_gone_or_new_are_named(tmp_path: Path) -> None:
    before = digest_contents(write(tmp_path, a=1, b=2))
    now = digest_contents(write(tmp_path, a=1, c=2))
    assert differences(before, now) == ["b is missing", "c was added"]


def test_a_file_is_read_once(tmp_path: Path, read: list[Path]) -> None:
    files = write(tmp_path, a=10, b=20)
    assert digest_contents(files) == digest_contents(files)
    assert sorted(read) == sorted(files.values())


@pytest.mark.parametrize("change", [lambda file: put(file, 3), lambda file: os.utime(file)])
def test_it_is_read_again_if_it_may_have_changed(
    tmp_path: Path, read: list[Path], change: Callable[[Path], None]
) -> None:
    files = write(tmp_path, a=10)
    digest_contents(files)
    change(files["a"])
    digest_contents(files)
    assert len(read) == 2


def test_beyond_a_size_large_files_are_read_in_parts(tmp_path: Path) -> None:
    files = write(tmp_path, first=LARGE, small=PART_BYTES, second=LARGE)
    whole = digest_contents(files)
    assert read_in_parts(whole) == []
    found = digest_contents(files, whole_bytes=LARGE + 1)
    assert read_in_parts(found) == ["second"]
    assert {name: found[name] for name in ("first", "small")} == {
        name: whole[name] for name in ("first", "small")
    }


@pytest.mark.parametrize(
    ("where", "noticed"),
    [(0, True), (PART_BYTES - 1, True), (LARGE - 1, True), (PART_BYTES + 9, False)],
)
def test_parts_cover_both_ends_and_not_all_between(
    tmp_path: Path, where: int, noticed: bool
) -> None:
    files = write(tmp_path, a=LARGE)
    before = digest_contents(files, whole_bytes=0)
    put(files["a"], where)
    assert (digest_contents(files, whole_bytes=0) != before) is noticed


def test_parts_are_spread_evenly_and_the_size_counts(tmp_path: Path) -> None:
    files = write(tmp_path, a=LARGE)
    before = digest_contents(files, whole_bytes=0)
    for number in range(PARTS):
        put(files["a"], (LARGE - PART_BYTES) * number // (PARTS - 1) + 5)
        now = digest_contents(files, whole_bytes=0)
        assert now != before
        before = now
    write(tmp_path, a=LARGE)
    zeros = digest_contents(files, whole_bytes=0)
    write(tmp_path, a=LARGE + 1)
    assert digest_contents(files, whole_bytes=0) != zeros


def test_files_are_read_as_they_were_before(tmp_path: Path) -> None:
    """Otherwise one file that has grown would make others look changed."""
    files = write(tmp_path, first=LARGE, second=LARGE)
    before = digest_contents(files, whole_bytes=LARGE)
    put(files["first"], LARGE)  # one byte longer
    now = digest_contents(files, before, whole_bytes=LARGE)
    assert differences(before, now) == ["first has changed"]
    assert read_in_parts(now) == ["second"]
