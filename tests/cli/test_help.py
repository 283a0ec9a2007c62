"""What `--help` and `--version` show, and how little they import."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from craftcli import __version__
from craftcli.cli.train import MAIN_OPTIONS
from craftcli.config.settings import option_name
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
    "inspect",
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
    for module in ("cache.build", "train", "dryrun"):
        monkeypatch.setattr(f"craftcli.cli.{module}.quiet_libraries", stop)
    # What the examples name is not there.
    for check in ("check_cache", "check_instructions", "check_run"):
        monkeypatch.setattr(f"craftcli.cli.early_checks.{check}", lambda path, **_: None)
    for example in help_of(command)[1]:
        result = craft(*shlex.split(example)[1:])
        assert result.exit_code == 42, f"{example}: {result.output}"


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_readable_on_a_narrow_terminal(
    craft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, command: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text, _, _ = craft(*command.split(), "--help").stdout.partition("Examples:")
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= columns
    options = [line for line in text.splitlines() if re.match(r"│ (-\w, )?--", line)]
    names = [re.findall(r"--[\w.-]+", line)[0] for line in options]
    # One spelling each, the main one, and room for a help text beside it.
    assert len(names) == len(set(names))
    assert not any("_" in name or "." in name for name in names)
    assert all(beside_or_below(line, text) for line in options)
    # No word is broken: each is also in the help on a wide terminal.
    monkeypatch.setenv("COLUMNS", "400")
    wide = craft(*command.split(), "--help").stdout
    assert {word for word in text.split() if "─" not in word} <= set(wide.split())


def beside_or_below(option: str, text: str) -> bool:
    """Whether the help text of an option has room beside its name, or stands in the next line."""
    below = text.split(option, 1)[1].splitlines()[1]
    return bool(re.search(r"  [^\s│]", option) or re.match(r"│     \S", below))


def test_help_shows_the_options_that_most_users_need_first(help_of: Any) -> None:
    main = help_of("train")[0].split("╭─ ")[1]
    assert main.startswith("Main options")
    assert len(MAIN_OPTIONS) == 10
    assert re.findall(r"^│ (?:-o, )?(--[\w-]+)", main, re.MULTILINE) == [
        option_name(name) for name in MAIN_OPTIONS
    ]


def test_help_shows_choices_defaults_and_what_is_required(help_of: Any) -> None:
    text = help_of("train")[0]
    assert "One of nmse, mse, l1, cosine. [default: nmse]" in text
    assert "Number of optimizer steps. [default: 10000]" in text
    assert "Number of optimizer steps. [default: 3]" in help_of("dryrun")[0]
    assert re.search(r"--output PATH .* \[required\]", help_of("cache merge")[0])
    assert "--no-inputs  " in help_of("cache export")[0]


@pytest.mark.parametrize("command", ["train", "cache build", "cache inspect", "info"])
def test_other_spellings_are_listed_once_at_the_end(help_of: Any, command: str) -> None:
    text = help_of(command)[0]
    assert text.count("--policy.path") == 1
    assert text.index("--help") < text.index("--policy.path (--policy)") < text.index("Examples:")


def test_a_flag_of_a_file_can_be_unset(craft: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('mode = "none"\nfreeze_downstream = true\n')
    file = ("train", "--config", "run.toml", "--resume", "nowhere")
    assert "--freeze-downstream needs" in craft(*file).stderr
    unset = craft(*file, "--freeze-downstream", "--no-freeze-downstream")
    assert "--freeze-downstream needs" not in unset.stderr
    assert "nowhere" in unset.stderr


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


@pytest.mark.parametrize("command", COMMANDS)
def test_h_is_short_for_help(craft: Callable[..., Any], command: str) -> None:
    short, long = craft(*command.split(), "-h"), craft(*command.split(), "--help")
    assert short.exit_code == 0
    assert short.stdout == long.stdout
    assert "-h, --help" in long.stdout


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


COMPLETION = """
import json, os, sys
os.environ |= {"_CRAFT_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
os.environ["COMP_WORDS"] = "craft train --eps"
from craftcli.cli.app import main
try:
    main()
finally:
    print(json.dumps(sorted(name for name in sys.modules if "." not in name)), file=sys.stderr)
"""


def test_bash_completes_options_without_heavy_imports() -> None:
    done = subprocess.run([sys.executable, "-c", COMPLETION], capture_output=True, text=True)
    assert {"--epsilon", "--epsilon-start", "--epsilon-end"} <= set(done.stdout.split())
    assert not set(json.loads(done.stderr)) & HEAVY


def test_completion_can_be_shown_and_installed(craft: Callable[..., Any]) -> None:
    text = craft("--help").stdout
    assert "--install-completion" in text
    assert "--show-completion" in text


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("craft tr", ["train"]),
        ("craft cache build --poo", ["--pooling"]),
        ("craft train --loss ", ["nmse", "mse", "l1", "cosine"]),
    ],
)
def test_the_shell_completes_commands_options_and_choices(typed: str, completed: list[str]) -> None:
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    done = subprocess.run(
        [Path(sys.executable).with_name("craft")],
        env={**os.environ, "_CRAFT_COMPLETE": "complete_bash", **asked},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == completed
