"""Text that comes from files reaches the terminal without control characters, and shortened."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made.manifests import edit_manifest

from craftcli.cli.output import Output, readable
from craftcli.errors import CraftError

NASTY = "x\x1b[2J\x1b]0;title\x07\r\x9b31m\u202e\ud800y"
READABLE = r"x\x1b[2J\x1b]0;title\x07\r\x9b31m\u202e\ud800y"


def show_error(output: Output, text: str) -> None:
    output.error(CraftError(text, why=text, fix=text))


WAYS: dict[str, Callable[[Output, str], None]] = {
    "say": lambda output, text: output.say(text),
    "note": lambda output, text: output.note(text),
    "warn": lambda output, text: output.warn(text),
    "error": show_error,
    "table": lambda output, text: output.table("title", {"name": text}),
    "names": lambda output, text: output.table("title", {text: "value"}),
    "title": lambda output, text: output.table(text, {"name": "a value wider than its title"}),
    "grid": lambda output, text: output.grid(("a", "b", text), [(text, "2", text)]),
}


@pytest.mark.parametrize("way", WAYS)
def test_control_characters_are_spelled_out(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    WAYS[way](Output(), NASTY)
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert not set(NASTY) & {c for c in shown if not c.isprintable() and c != "\n"}
    if way != "title":  # folded to the width of its table
        assert READABLE in shown


@pytest.mark.parametrize("way", WAYS)
def test_long_text_is_shortened(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    WAYS[way](Output(), "ab" * 5_000_000)
    captured = capsys.readouterr()
    assert len(captured.out + captured.err) < 20_000
    if way != "names":  # cut to one line
        assert "9,998,000" in captured.out + captured.err


def test_json_is_exact_and_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).json({"text": NASTY})
    shown = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert json.loads(shown) == {"text": NASTY}


def test_an_error_from_a_file_cannot_look_like_one_of_crafts_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Output().error(CraftError("a", why="b\nError: c", fix="d"))
    assert "\nError: c" not in capsys.readouterr().err


def test_words_of_people_stay_as_they_are() -> None:
    text = "Öffne die rote Schublade, λ ≤ ε, 抓取\tand\nnext"
    assert readable(text) == text


def test_the_strings_of_a_manifest(cache: Path, tmp_path: Path, craft: Callable[..., Any]) -> None:
    own = Path(shutil.copytree(cache, tmp_path / "own.zarr"))
    for length, code in ((4000, 0), (10_000_000, 1)):
        edit_manifest(own, source="\x1b[2J" + "a" * length, policy_type="\x1b]0;x\x07")
        result = craft("cache", "inspect", own, "--verify")
        assert result.exit_code == code, result.output
        assert "\x1b" not in result.output
        assert len(result.output) < 20_000
