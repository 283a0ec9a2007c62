"""A run's folder: ours or nobody's, and the old one gone only after the new one is good."""

from pathlib import Path

import pytest

from craftcli.engine.run_folder import check_output, run_folder
from craftcli.errors import CraftError


def old_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "craft_config.json").write_text("old")
    return folder


def test_a_run_that_ends_well_replaces_the_old_one(tmp_path: Path) -> None:
    output = old_run(tmp_path / "run")
    with run_folder(output, "new", overwrite=True):
        pass
    assert (output / "craft_config.json").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_run_that_fails_before_a_checkpoint_gives_the_old_one_back(tmp_path: Path) -> None:
    output = old_run(tmp_path / "run")
    with pytest.raises(CraftError), run_folder(output, "new", overwrite=True):
        raise CraftError("NaN", why="", fix="")
    assert (output / "craft_config.json").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_run_that_fails_after_a_checkpoint_keeps_both(tmp_path: Path) -> None:
    output = old_run(tmp_path / "run")

    def break_off() -> None:
        (output / "checkpoints").mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), run_folder(output, "new", overwrite=True):
        break_off()
    assert (output / "checkpoints").is_dir()
    assert (tmp_path / "run.replaced/craft_config.json").read_text() == "old"


def test_an_empty_folder_is_free(tmp_path: Path) -> None:
    check_output(tmp_path, overwrite=False)
