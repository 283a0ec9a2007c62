"""How much memory is free and was used, as the system tells it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from craftcli.system import memory
from craftcli.system.memory import free_bytes, peak_bytes


@pytest.fixture
def meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 100 kB\nMemAvailable:     60 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", file)
    monkeypatch.setattr(memory, "LIMITS", ((tmp_path / "max", tmp_path / "current"),))
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
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert free_bytes() == 5 * 4096


def test_unknown_memory_is_none(meminfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: str) -> int:
        raise ValueError("unrecognized configuration name")

    meminfo.unlink()
    monkeypatch.setattr(os, "sysconf", unknown)
    assert free_bytes() == 0


def test_a_system_without_sysconf_tells_nothing(
    meminfo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo.unlink()
    monkeypatch.delattr(os, "sysconf")
    assert free_bytes() == 0


_PEAKS = """
from craftcli.system.memory import peak_bytes, reset_peak

reset_peak()
before = peak_bytes()
block = bytearray(b"1") * (64 * 2**20)
with_block = peak_bytes()
del block
reset_peak()
print(before, with_block, peak_bytes())
"""


def test_the_peak_grows_with_what_is_used_and_can_be_reset() -> None:
    # In a process of its own: other threads of this one, and the system, give memory back.
    shown = subprocess.run(
        [sys.executable, "-c", _PEAKS], capture_output=True, check=True, text=True
    ).stdout
    before, with_block, after = map(int, shown.split())
    assert with_block >= before + 48 * 2**20
    assert after < with_block


def test_without_proc_the_peak_comes_from_the_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none")
    assert peak_bytes() > 10 * 2**20


def test_without_proc_and_resource_the_peak_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none")
    monkeypatch.setitem(sys.modules, "resource", None)
    assert peak_bytes() == 0
