"""`kill -9` at random moments, in short; tests/benchmarks/cache_kill.py does a hundred."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).parents[2] / "benchmarks/cache_kill.py"


@pytest.mark.slow
def test_killed_builds_end_in_the_bytes_of_an_undisturbed_one() -> None:
    arguments = ("--kills", "9", "--demo-kills", "0", "--seed", "1")
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(COMMAND), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *series, last = ended.stdout.splitlines()
    assert re.fullmatch(r"9 kills, wrong rows: 0, chunks recomputed: max [01] per process", last)
    assert [re.findall(r"(\d) process.*: (\d+) kills", line) for line in series] == [
        [("1", "6")],
        [("2", "3")],
    ]
    assert all("files that differ: 0" in line for line in series)
