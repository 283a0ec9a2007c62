"""Curves from metrics files of any length."""

import json
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from craftcli.compare.curves import MOST_POINTS, read_curves
from craftcli.errors import CraftError


def write(file: Path, lines: int) -> Path:
    with file.open("w") as opened:
        for step in range(1, lines + 1):
            entry = {"step": step, "loss": 1 / step, "grad_norm": 1.0, "lams": {"all": 1.0}}
            opened.write(json.dumps(entry) + "\n")
    return file


def test_a_short_file_is_read_whole(tmp_path: Path) -> None:
    points = read_curves(write(tmp_path / "a", 100)).points
    assert [point["step"] for point in points] == list(range(1, 101))
    assert points[1] == {"step": 2, "loss": 0.5}


def test_a_long_file_is_thinned_in_bounded_memory(tmp_path: Path) -> None:
    """A million lines once took 3.2 GiB."""
    lines = 50 * MOST_POINTS + 3
    file = write(tmp_path / "a", lines)
    tracemalloc.start()
    points = read_curves(file).points
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert MOST_POINTS <= len(points) <= 2 * MOST_POINTS + 1
    steps = [point["step"] for point in points]
    assert (steps[0], steps[-1]) == (1, lines)
    assert len({b - a for a, b in pairwise(steps[:-1])}) == 1
    assert peak < 10 * 2**20 < file.stat().st_size * 2


def test_half_a_line_at_the_end_is_a_run_that_is_writing(tmp_path: Path) -> None:
    file = write(tmp_path / "a", 3)
    with file.open("a") as opened:
        opened.write('{"step": 4, "lo')
    assert len(read_curves(file).points) == 3
    assert read_curves(tmp_path / "none").points == ()


def test_copies_have_the_same_digest(tmp_path: Path) -> None:
    digests = {read_curves(write(tmp_path / name, 5)).digest for name in "ab"}
    assert len(digests) == 1
    assert read_curves(write(tmp_path / "c", 6)).digest not in digests


@pytest.mark.parametrize("line", [b"garbage", b"[1]", b'{"step": 2, "loss": "x"}', b"\xff", b"{}"])
def test_a_line_that_no_run_writes_is_named(tmp_path: Path, line: bytes) -> None:
    file = write(tmp_path / "a", 1)
    with file.open("ab") as opened:
        opened.write(line + b"\n")
    with pytest.raises(CraftError, match=r"Cannot read .*line 2"):
        read_curves(file)


def test_an_endless_line_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1" * 2**21)
    with pytest.raises(CraftError, match="a line has more than"):
        read_curves(tmp_path / "a")
