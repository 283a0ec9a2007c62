"""A run has one writer: others are refused with the number of its process."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from craftcli.distributed import Processes
from craftcli.engine.resuming import read_run
from craftcli.engine.run_folder import check_output, run_folder
from craftcli.engine.run_lock import Holder, holder, require_free, run_locked
from craftcli.errors import CraftError

HOLDS = """
import sys
from pathlib import Path
from craftcli.engine.run_lock import run_locked
with run_locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with run_folder(tmp_path / "run", "{}", overwrite=False):
        pass
    return tmp_path / "run"


@pytest.fixture
def other(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes the run."""
    command = [sys.executable, "-c", HOLDS, str(run)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        assert child.stdout.readline() == "locked\n"
        yield child
        child.kill()


def test_the_second_is_refused_by_name(run: Path, other: subprocess.Popen[str]) -> None:
    found = Holder(pid=other.pid, host=socket.gethostname())
    assert holder(run) == found
    refused = rf"run {run} is in use\. Why: process {other.pid} on {socket.gethostname()} writes"
    with pytest.raises(CraftError, match=refused):
        check_output(run, overwrite=True)
    with pytest.raises(CraftError, match=refused), run_folder(run, "{}", overwrite=True):
        pass
    with pytest.raises(CraftError, match=refused):
        read_run(run, {}, Processes())
    with pytest.raises(CraftError, match=refused), run_locked(run):
        pass


def test_a_killed_process_holds_no_lock(run: Path, other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    assert holder(run) is None
    with run_locked(run):
        pass


def test_a_process_is_also_set_against_itself(run: Path) -> None:
    with run_locked(run):
        assert holder(run) == Holder(pid=os.getpid(), host=socket.gethostname())
        with pytest.raises(CraftError, match="is in use"), run_locked(run):
            pass
        # To look at it must not release it.
        with pytest.raises(CraftError, match=f"process {os.getpid()}"):
            require_free(run)
    require_free(run)


def test_a_run_without_a_lock_file_is_free(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    assert holder(tmp_path / "missing") is None
