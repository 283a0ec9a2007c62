"""The real `craft train` with a worker process: signals to all of it, and a worker that is killed.

tests/engine/test_ending.py forks a trainer; here it is the command in a shell of its own.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SMALL = ("--mode", "none", "--batch-size", "2", "--device", "cpu", "--workers", "1")
LONG = ("--steps", "100000", "--log-every", "1", "--save-every", "5", "-o", "run")
PATIENCE_S = 240


@contextmanager
def training(folder: Path, new_data: Any) -> Iterator[subprocess.Popen[str]]:
    """A training that has saved a checkpoint and goes on."""
    command = (sys.executable, "-m", "craftcli", "train", *SMALL, *LONG)
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,  # with a process group of its own
        )
    try:
        wait_until(lambda: process.poll() is not None or len(logged_steps(folder / "run")) > 5)
        wait_until(lambda: process.poll() is not None or (folder / "run/checkpoints/last").exists())
        assert process.poll() is None, said(folder)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def logged_steps(run: Path) -> list[int]:
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.is_file() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def said(folder: Path) -> str:
    return " ".join((folder / "output").read_text().split())


def workers_of(parent: int) -> list[int]:
    """The worker processes of a training, which Python has spawned."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # The name of a program, in brackets, may hold anything.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == parent and b"spawn_main" in command:
            found.append(int(process.name))
    return found


def resume(craft: Callable[..., Any], done: int) -> None:
    """Two more steps, in this process and without workers."""
    result = craft("train", "--resume", "run", "--workers", 0, "--steps", done + 2)
    assert result.exit_code == 0, result.output
    assert logged_steps(Path("run")) == list(range(1, done + 3))


@pytest.mark.slow
def test_sigterm_to_the_whole_group_saves_and_exits_with_130(
    craft: Callable[..., Any], new_data: Any, tmp_path: Path
) -> None:
    with training(tmp_path, new_data) as process:
        assert len(workers_of(process.pid)) == 1
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 130, said(tmp_path)
    step = logged_steps(tmp_path / "run")[-1]
    assert f"interrupted after step {step} of 100000, and saved" in said(tmp_path)
    saved = tmp_path / "run/checkpoints/last"
    assert int(saved.readlink().name) == step
    assert (saved / "pretrained_model/model.safetensors").is_file()
    resume(craft, step)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_explained_and_no_checkpoint_is_lost(
    craft: Callable[..., Any], new_data: Any, tmp_path: Path
) -> None:
    with training(tmp_path, new_data) as process:
        (worker,) = workers_of(process.pid)
        os.kill(worker, signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 1, said(tmp_path)
    assert "A worker process that reads the data has ended" in said(tmp_path)
    assert "no explanation for" not in said(tmp_path)
    resume(craft, int((tmp_path / "run/checkpoints/last").readlink().name))
