"""A full disk and folders that cannot be written: refused early, or explained."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from craftcli.cli.disk_space import check_checkpoints, free_bytes
from craftcli.cli.options import guarded
from craftcli.cli.os_errors import is_full_disk
from craftcli.cli.output import Output
from craftcli.config.train import TrainConfig
from craftcli.engine.checkpoint_size import checkpoint_bytes
from craftcli.errors import CraftError

MIB = 2**20


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the free bytes of the disk."""

    def set_free(count: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=count))

    return set_free


def test_a_build_that_does_not_fit_is_refused(
    craft: Callable[..., Any], leave: Callable[[int], None], tmp_path: Path
) -> None:
    leave(1000)
    result = craft("cache", "build", "--samples", 16)
    assert result.exit_code == 1
    assert "has no room for the cache." in result.stderr
    assert "1000 B are free" in result.stderr
    assert not (tmp_path / "anchors.zarr").exists()


def test_a_run_whose_checkpoint_does_not_fit_is_refused(
    craft: Callable[..., Any], leave: Callable[[int], None], tmp_path: Path
) -> None:
    leave(1000)
    result = craft("train", "--mode", "none", "--steps", 1, "--output", "run")
    assert result.exit_code == 1
    assert "has no room for a checkpoint." in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_fits_in_part_is_warned(
    leave: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(3 * MIB)
    often, once = TrainConfig(steps=10, save_every=2), TrainConfig(steps=10, save_every=0)
    check_checkpoints(tmp_path / "run", MIB, once, 0, Output())
    check_checkpoints(tmp_path / "run", MIB, often, 4, Output())
    assert capsys.readouterr().err == ""
    check_checkpoints(tmp_path / "run", MIB, often, 0, Output())
    assert "5 checkpoints of about 1.0 MiB do not fit" in capsys.readouterr().err


def test_the_size_of_a_checkpoint_is_known_before(
    craft: Callable[..., Any], teacher: Any, tmp_path: Path
) -> None:
    assert craft("train", "--mode", "none", "--steps", 1, "--output", "run").exit_code == 0
    folder = tmp_path / "run/checkpoints/last/"
    written = sum(file.stat().st_size for file in folder.resolve().rglob("*.safetensors"))
    assert checkpoint_bytes(teacher) == pytest.approx(written, rel=0.1)


def test_free_space_of_a_place_that_is_not_there(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a/b/c") == shutil.disk_usage(tmp_path).free


def full() -> Exception:
    return OSError(errno.ENOSPC, "No space left on device", "runs/a/model.safetensors")


def wrapped() -> Exception:
    error = CraftError("Cannot read the data.", why="damaged.", fix="download it again.")
    error.__cause__ = full()
    return error


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (full(), "The disk is full at runs/a/model.safetensors."),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "The disk is full."),
        (wrapped(), "The disk is full."),
        (PermissionError(errno.EACCES, "Permission denied", "/home/x"), "read at /home/x."),
        (OSError(errno.EROFS, "Read-only file system", "/home/x"), "read at /home/x."),
        (FileNotFoundError(errno.ENOENT, "No such file", "/home/x"), "There is no /home/x"),
    ],
)
def test_errors_of_the_system_are_explained(
    error: Exception, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(output: Output) -> None:
        raise error

    with pytest.raises(typer.Exit):
        guarded(act, as_json=False, debug=False)
    shown = capsys.readouterr().err
    assert what in shown
    assert "HF_HOME" in shown
    assert "has no explanation" not in shown


def test_a_home_that_cannot_be_written_is_explained(
    craft: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("CRAFT_HOME", str(tmp_path / "file/home"))
    result = craft("train", "--mode", "none", "--steps", 1)
    assert result.exit_code == 1
    assert "Cannot write the demo's data to" in result.stderr
    assert "set CRAFT_HOME" in result.stderr


def test_errors_that_cause_each_other_are_looked_at_once() -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert not is_full_disk(first)
