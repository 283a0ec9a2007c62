"""Files mapped into memory, side by side and one by one, with the C library and without it."""

import ctypes
import errno
import gc
import importlib.util
import mmap
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from craftcli.system import file_mapping
from craftcli.system.file_mapping import MappedFiles, map_file

PAGE = mmap.PAGESIZE


def add(files: MappedFiles, file: Path, content: bytes, offset: int) -> None:
    file.write_bytes(content)
    with file.open("rb") as opened:
        files.add(opened.fileno(), offset, len(content))
    file.unlink()


def test_files_are_read_as_one(tmp_path: Path) -> None:
    files = MappedFiles(2 * PAGE + 3)
    add(files, tmp_path / "b", b"b" * PAGE, PAGE)
    add(files, tmp_path / "c", b"ccc", 2 * PAGE)
    add(files, tmp_path / "a", b"a" * PAGE, 0)
    assert files.values.tobytes() == b"a" * PAGE + b"b" * PAGE + b"ccc"
    with pytest.raises(ValueError, match="read-only"):
        files.values[0] = 1


@pytest.mark.parametrize(("offset", "size"), [(1, 1), (PAGE, PAGE + 1), (-PAGE, 1), (2 * PAGE, 1)])
def test_nothing_is_mapped_outside(tmp_path: Path, offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="cannot be mapped"):
        add(MappedFiles(2 * PAGE), tmp_path / "a", b"a" * size, offset)


def test_what_cannot_be_mapped_is_an_os_error() -> None:
    with pytest.raises(OSError, match="descriptor") as caught:
        MappedFiles(PAGE).add(-1, 0, 1)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="memory"):
        MappedFiles(1 << 62)


def mapped(file: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(file))


def test_a_mapping_lives_as_long_as_a_view_of_it(tmp_path: Path) -> None:
    file = tmp_path / "mapped-file"
    files = MappedFiles(PAGE)
    file.write_bytes(b"x" * PAGE)
    with file.open("rb") as opened:
        files.add(opened.fileno(), 0, PAGE)
    view = files.values.view(np.uint16)[5:7].reshape(2, 1)
    del files
    gc.collect()
    assert mapped(file) == 1
    assert view.tobytes() == b"xxxx"
    del view
    gc.collect()
    assert mapped(file) == 0


@pytest.fixture
def fallback(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is imported where the C library has no mmap."""

    def refuse(name: Any, **_: Any) -> Any:
        raise OSError(f"no library {name}")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert file_mapping.__file__ is not None
    spec = importlib.util.spec_from_file_location("fallback_mapping", file_mapping.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fallback_mapping", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", [1, PAGE, PAGE + 3])
def test_a_file_is_mapped_with_and_without_the_c_library(
    tmp_path: Path, fallback: ModuleType, size: int
) -> None:
    file = tmp_path / "a"
    content = np.arange(size + 4, dtype=np.uint8)
    file.write_bytes(content.tobytes())
    for mapping in (map_file, fallback.map_file):
        with file.open("rb") as opened:
            values = mapping(opened.fileno(), size)
        np.testing.assert_array_equal(values, content[:size])
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1


def test_without_the_c_library_few_files_are_mapped_and_none_side_by_side(
    fallback: ModuleType,
) -> None:
    assert file_mapping.SIDE_BY_SIDE
    assert not fallback.SIDE_BY_SIDE
    # Each keeps its file open, and a process may open 1,024 by default.
    assert fallback.MAX_MAPPINGS < 1024 < file_mapping.MAX_MAPPINGS
