"""What goes to stdout and stderr: progress, hints, and letters that a terminal lacks."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from craftcli.cli.encoding import HANDLER, set_up_streams
from craftcli.cli.output import Output
from craftcli.cli.plain_progress import PlainProgress


class Seconds:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_without_a_terminal_is_a_line_every_ten_seconds() -> None:
    lines: list[str] = []
    clock = Seconds()
    progress = PlainProgress("Training", 400, "steps", say=lines.append, clock=clock)
    for step in range(400):
        clock.now = 0.25 * (step + 1)
        progress.advance(1)
    assert len(lines) == 10
    assert lines[0] == "Training: 40/400 steps, 4.0 steps/s, about 1:30 left"
    assert lines[-1] == "Training: 400/400 steps, 4.0 steps/s"


def test_quick_work_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().progress(10, "rows", "Anchors") as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal_carries_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, any stream is then a terminal
    monkeypatch.setenv("COLUMNS", "100")
    with Output().progress(10, "rows", "Anchors [old]") as advance:
        advance(10)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).split("\r")[-1]
    assert "Anchors [old]" in drawn
    assert "10/10 rows" in drawn


def test_the_next_command_is_a_hint_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    Output().next("craft train")
    Output(as_json=True).next("craft train")
    assert capsys.readouterr() == ("", "Next: craft train\n")


def test_letters_that_an_encoding_lacks_are_spelled_out() -> None:
    set_up_streams()
    spelled = "λ=1.0 | ε=0.02 | 1. ✓ Ωk".encode("ascii", errors=HANDLER)
    assert spelled == b"lambda=1.0 | epsilon=0.02 | 1. ok ?k"


def test_an_ascii_terminal_shows_help_and_json(tmp_path: Path) -> None:
    script = """
from craftcli.cli.app import main
from craftcli.cli.encoding import set_up_streams
from craftcli.cli.output import Output
set_up_streams()
Output(as_json=True).json({"letter": "ε"})
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "train", "--help"],
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path), "COLUMNS": "80"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "Budget epsilon for L_ret" in done.stdout
    start = done.stdout[: done.stdout.index("}") + 1]
    assert json.loads(start) == {"letter": "ε"}


NEXT = {
    ("cache", "inspect", "CACHE"): "Next: craft train --cache CACHE",
    ("cache", "merge", "CACHE", "CACHE", "-o", "two.zarr"): "Next: craft cache inspect two.zarr",
    ("cache", "export", "CACHE", "-o", "a.safetensors"): "Next: safetensors.torch.load_file",
    ("info",): "Next: craft dryrun",
}


@pytest.mark.parametrize(("command", "line"), NEXT.items(), ids=lambda value: " ".join(value[:2]))
def test_a_command_ends_with_the_one_that_follows(
    craft: Callable[..., Any], cache: Path, command: tuple[str, ...], line: str
) -> None:
    given = [part.replace("CACHE", str(cache)) for part in command]
    result = craft(*given)
    assert result.exit_code == 0, result.output
    assert line.replace("CACHE", str(cache)) in result.stderr
    assert "Next:" not in result.stdout


def test_the_whole_way_is_shown(craft: Callable[..., Any], cache: Path, tmp_path: Path) -> None:
    """Each command names the next, and that one runs."""
    rehearsed = craft("dryrun", "--cache", cache, "--steps", 1, "--lr", 0.001)
    assert rehearsed.stderr.splitlines()[-1] == f"Next: craft train --cache {cache} --lr 0.001"
    short = ("--steps", "1", "--batch-size", "2", "--output", "runs/a")
    trained = craft("train", "--lr", "0.001", "--cache", cache, *short)
    assert trained.stderr.splitlines()[-1] == "Next: craft eval runs/a"
    evaluated = craft("eval", "runs/a", "--episodes", 1, "--samples", 4)
    assert evaluated.stderr.splitlines()[-1] == "Next: craft compare runs/a"
    # A run that makes its own anchors keeps them there.
    (tmp_path / "runs/anchors-0123.zarr").mkdir()
    compared = craft("compare", *sorted((tmp_path / "runs").iterdir()))
    assert compared.exit_code == 0, compared.output
    assert "Next: open compare/index.html in a browser." in compared.stderr
