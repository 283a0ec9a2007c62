"""What `--help` and `--version` show, and how little they import."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from craftcli import __version__
from craftcli.errors import CraftError

COMMANDS = [
    "",
    "cache",
    "cache build",
    "cache inspect",
    "cache import",
    "cache merge",
    "cache export",
    "train",
    "dryrun",
    "merge",
    "eval",
    "compare",
    "info",
]
HEAVY = {"torch", "lerobot", "zarr", "transformers", "numpy"}

EVERY_HELP = f"""
import json, sys
from typer.testing import CliRunner
from craftcli.cli.app import app
for command in {COMMANDS!r}:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0, result.output
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


@pytest.fixture
def help_of(
    craft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[str, list[str]]]:
    """The help of a command on a wide terminal, and the examples at its end."""
    monkeypatch.setenv("COLUMNS", "200")

    def show(command: str) -> tuple[str, list[str]]:
        result = craft(*command.split(), "--help")
        assert (result.exit_code, result.stderr) == (0, "")
        _, _, examples = result.stdout.partition("Examples:")
        return result.stdout, [line.strip() for line in examples.splitlines() if line.strip()]

    return show


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_usage_and_examples(help_of: Any, command: str) -> None:
    text, examples = help_of(command)
    assert f"Usage: craft {command}".rstrip() in text
    assert examples
    assert all(example.startswith(f"craft {command}".rstrip()) for example in examples)


@pytest.mark.parametrize("command", ["cache build", "train", "dryrun"])
def test_examples_in_the_help_are_valid_commands(
    help_of: Any, craft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def stop(*, debug: bool) -> None:
        raise CraftError("Settings accepted.", why="they fit.", fix="none.", exit_code=42)

    # The first thing a command does once its settings are accepted.
    for module in ("cache", "train", "dryrun"):
        monkeypatch.setattr(f"craftcli.cli.{module}.quiet_libraries", stop)
    for example in help_of(command)[1]:
        result = craft(*shlex.split(example)[1:])
        assert result.exit_code == 42, f"{example}: {result.output}"


@pytest.mark.parametrize(
    "option",
    ["--policy.path", "--dataset.repo_id", "--dataset.root", "--output_dir", "--batch_size"],
)
def test_lerobots_spellings_are_offered(help_of: Any, option: str) -> None:
    assert option in help_of("train")[0]
    assert option in help_of("cache build")[0]


def test_commands_without_arguments_show_their_help(craft: Callable[..., Any]) -> None:
    for command in ([], ["cache"]):
        assert "Usage: craft" in craft(*command).output


def test_version(craft: Callable[..., Any]) -> None:
    result = craft("--version")
    assert (result.exit_code, result.stdout) == (0, f"craft {__version__}\n")


def test_an_unknown_command_is_a_usage_error(craft: Callable[..., Any]) -> None:
    result = craft("tarin")
    assert result.exit_code == 2
    assert "tarin" in result.stderr


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVERY_HELP], capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert "craftcli" in loaded
    assert not loaded & HEAVY
