"""Several processes that build one cache: who does what, and the same bytes as one."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made.files import tree

from craftcli.distributed import Processes
from craftcli.errors import EXIT_USAGE, CraftError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SETTINGS = ("--samples", "20", "--batch-size", "4", "--chunk-mib", "0.011", "--device", "cpu")


@given(st.integers(1, 9), st.integers(0, 40))
def test_every_chunk_belongs_to_one_process(world: int, chunks: int) -> None:
    shares = [list(Processes(rank=rank, world=world).own(chunks)) for rank in range(world)]
    assert sorted(chunk for share in shares for chunk in share) == list(range(chunks))
    assert all(chunk % world == rank for rank, share in enumerate(shares) for chunk in share)


def test_torchrun_says_who_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Processes.from_environment() == Processes(rank=0, world=1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    third = Processes.from_environment()
    assert (third.rank, third.world, third.is_first, third.alone) == (2, 3, False, False)


@pytest.mark.parametrize(("rank", "world"), [("3", "3"), ("-1", "2"), ("", "2"), ("0", "two")])
def test_an_environment_that_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, rank: str, world: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(CraftError, match=f"WORLD_SIZE={world!r}") as caught:
        Processes.from_environment()
    assert caught.value.exit_code == EXIT_USAGE


def test_one_process_waits_for_nobody() -> None:
    alone = Processes()
    with alone.connected():
        alone.wait()
        assert alone.total(7) == 7


def start(code: str, world: int, path: Path) -> list[subprocess.Popen[str]]:
    """Run code in several processes; it has the benchmark's `synthetic` build and a path."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    prologue = (
        f"import os, sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        f"from cache_kill import synthetic; from pathlib import Path; path = Path({str(path)!r})\n"
    )
    environment = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", prologue + code],
            env={**os.environ, **environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


@pytest.mark.slow
def test_more_processes_than_chunks_give_the_same_bytes(tmp_path: Path) -> None:
    code = "synthetic(path, lambda _: None, chunks=2)"
    for world, name in ((1, "one"), (3, "three")):
        for process in start(code, world, tmp_path / name / "a.zarr"):
            _, errors = process.communicate(timeout=120)
            assert (process.returncode, errors) == (0, "")
    assert tree(tmp_path / "one/a.zarr") == tree(tmp_path / "three/a.zarr")
    assert os.listdir(tmp_path / "three") == ["a.zarr"]


@pytest.mark.slow
def test_the_others_do_not_wait_for_a_process_that_died(tmp_path: Path) -> None:
    """And what it had committed stays."""
    code = "def note(chunk):\n    if chunk == 3: os._exit(9)\nsynthetic(path, note, chunks=6)\n"
    first, second = start(code, 2, tmp_path / "a.zarr")
    _, errors = first.communicate(timeout=120)
    second.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (1, 9)
    assert "Process 0 of 2 stops, because another one has stopped" in errors
    assert "--resume" in errors
    records = tmp_path / "a.zarr.partial/commit/c"
    assert sorted(entry.name for entry in records.iterdir()) == ["0", "1", "2", "4"]


@pytest.mark.slow
def test_torchrun_builds_the_same_bytes_as_one_process(
    craft: Callable[..., Any], tmp_path: Path, old_data: Any
) -> None:
    """Chunks of 4 rows: three for the first process, two for the second."""
    assert craft("cache", "build", *SETTINGS, "-o", "one.zarr").exit_code == 0
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
    command = (*torchrun, "-m", "craftcli", "cache", "build", *SETTINGS, "-o", "two.zarr", "--json")
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("Using the built-in demo") == 1
    assert json.loads(ended.stdout)["rows"] == 20
    assert len(list((tmp_path / "two.zarr/commit/c").iterdir())) == 5
    assert tree(tmp_path / "one.zarr") == tree(tmp_path / "two.zarr")
    assert sorted(os.listdir(tmp_path)) == ["one.zarr", "two.zarr"]
