"""Errors as the user sees them: what, why, fix and an exit code."""

from collections.abc import Callable
from typing import Any

import pytest
import typer

from craftcli.cli.options import guarded
from craftcli.cli.output import Output
from craftcli.errors import CraftError

PROBLEM = CraftError("The gripper is [stuck].", why="rust.", fix="oil it.", exit_code=3)


def raising(error: BaseException) -> Callable[[Output], None]:
    def act(_: Output) -> None:
        raise error

    return act


def exit_code_of(error: BaseException, *, as_json: bool = False, debug: bool = False) -> int:
    with pytest.raises(typer.Exit) as caught:
        guarded(raising(error), as_json=as_json, debug=debug)
    return caught.value.exit_code


def test_an_error_reads_as_one_sentence_each() -> None:
    assert str(PROBLEM) == "The gripper is [stuck]. Why: rust. Fix: oil it."


def test_the_exit_code_is_1_by_default() -> None:
    assert CraftError("a", why="b", fix="c").exit_code == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_a_known_problem_goes_to_stderr(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    assert exit_code_of(PROBLEM, as_json=as_json) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "Error: The gripper is [stuck].\n  Why: rust.\n  Fix: oil it.\n"


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(PROBLEM, debug=True) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("Traceback (most recent call last):")
    assert shown.err.endswith("Error: The gripper is [stuck].\n  Why: rust.\n  Fix: oil it.\n")


def test_an_unknown_problem_points_to_debug(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(ZeroDivisionError("by zero")) == 1
    shown = capsys.readouterr().err
    assert "Why: ZeroDivisionError: by zero" in shown
    assert "Fix: run the command again with --debug" in shown
    assert "Traceback" not in shown


def test_debug_lets_an_unknown_problem_through() -> None:
    with pytest.raises(ZeroDivisionError):
        guarded(raising(ZeroDivisionError()), as_json=False, debug=True)


@pytest.mark.parametrize("debug", [False, True])
def test_an_interrupt_gives_130(capsys: pytest.CaptureFixture[str], debug: bool) -> None:
    assert exit_code_of(KeyboardInterrupt(), debug=debug) == 130
    assert capsys.readouterr().err == "Warning: interrupted.\n"


def test_an_exit_keeps_its_code() -> None:
    assert exit_code_of(typer.Exit(5)) == 5


def test_debug_on_the_command_line_shows_a_traceback(craft: Callable[..., Any]) -> None:
    arguments = ("cache", "inspect", "nowhere.zarr")
    plain, debug = craft(*arguments), craft(*arguments, "--debug")
    assert plain.exit_code == debug.exit_code == 1
    assert "Traceback" not in plain.output
    assert "Traceback (most recent call last):" in debug.stderr
    assert "Error: No cache at nowhere.zarr." in debug.stderr
