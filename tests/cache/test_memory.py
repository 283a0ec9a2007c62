import errno
import gc
import mmap
from pathlib import Path

import numpy as np
import pytest

from craftcli.cache import memory
from craftcli.cache.memory import Region, free_bytes

PAGE = mmap.PAGESIZE


@pytest.fixture
def meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 100 kB\nMemAvailable:     60 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", file)
    monkeypatch.setattr(memory, "_LIMITS", ((tmp_path / "max", tmp_path / "current"),))
    return file


def test_free_memory_is_what_the_system_says(meminfo: Path) -> None:
    assert free_bytes() == 60 * 1024


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("50000", "10000", 40000), ("max", "10000", 60 * 1024), ("900000", "1", 60 * 1024)],
)
def test_a_container_has_no_more_than_its_limit(
    meminfo: Path, tmp_path: Path, limit: str, used: str, expected: int
) -> None:
    (tmp_path / "max").write_text(f"{limit}\n")
    (tmp_path / "current").write_text(f"{used}\n")
    assert free_bytes() == expected


def test_a_container_beyond_its_limit_has_none(meminfo: Path, tmp_path: Path) -> None:
    (tmp_path / "max").write_text("10")
    (tmp_path / "current").write_text("20")
    assert free_bytes() == 0


@pytest.mark.parametrize("content", [None, "", "MemAvailable:\n", "MemAvailable: ? kB\n"])
def test_without_meminfo_half_of_all_memory_is_free(
    meminfo: Path, content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo.unlink()
    if content is not None:
        meminfo.write_text(content)
    sizes = {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(memory.os, "sysconf", sizes.__getitem__)
    assert free_bytes() == 5 * 4096


def test_unknown_memory_is_none(meminfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: str) -> int:
        raise ValueError("unrecognized configuration name")

    meminfo.unlink()
    monkeypatch.setattr(memory.os, "sysconf", unknown)
    assert free_bytes() == 0


def place(region: Region, file: Path, content: bytes, offset: int) -> None:
    file.write_bytes(content)
    with file.open("rb") as opened:
        region.place(opened.fileno(), offset, len(content))
    file.unlink()


def test_files_are_read_as_one(tmp_path: Path) -> None:
    region = Region(2 * PAGE + 3)
    place(region, tmp_path / "b", b"b" * PAGE, PAGE)
    place(region, tmp_path / "c", b"ccc", 2 * PAGE)
    place(region, tmp_path / "a", b"a" * PAGE, 0)
    assert region.values.tobytes() == b"a" * PAGE + b"b" * PAGE + b"ccc"
    with pytest.raises(ValueError, match="read-only"):
        region.values[0] = 1


@pytest.mark.parametrize(("offset", "size"), [(1, 1), (PAGE, PAGE + 1), (-PAGE, 1), (2 * PAGE, 1)])
def test_nothing_is_mapped_outside(tmp_path: Path, offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="cannot be mapped"):
        place(Region(2 * PAGE), tmp_path / "a", b"a" * size, offset)


def test_what_cannot_be_mapped_is_an_os_error() -> None:
    with pytest.raises(OSError, match="descriptor") as caught:
        Region(PAGE).place(-1, 0, 1)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="memory"):
        Region(1 << 62)


def mapped(file: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(file))


def test_a_mapping_lives_as_long_as_a_view_of_it(tmp_path: Path) -> None:
    file = tmp_path / "mapped-file"
    region = Region(PAGE)
    file.write_bytes(b"x" * PAGE)
    with file.open("rb") as opened:
        region.place(opened.fileno(), 0, PAGE)
    view = region.values.view(np.uint16)[5:7].reshape(2, 1)
    del region
    gc.collect()
    assert mapped(file) == 1
    assert view.tobytes() == b"xxxx"
    del view
    gc.collect()
    assert mapped(file) == 0
