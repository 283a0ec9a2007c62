"""A run's folder: only runs are replaced, and only after the new run has succeeded."""

import json
import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from craftcli.config.train import TrainConfig
from craftcli.engine import run_folder as module
from craftcli.engine.run_folder import (
    check_output,
    claim_output,
    recover_lost_run,
    remove_replaced,
    replaced_run,
    run_folder,
)
from craftcli.errors import EXIT_USAGE, CraftError


def old_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "craft_config.json").write_text("old")
    return folder


def save_checkpoint(run: Path) -> None:
    (run / "checkpoints/000001").mkdir(parents=True)
    (run / "checkpoints/last").symlink_to("000001")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_run_that_ends_well_replaces_the_old_one(tmp_path: Path) -> None:
    output = old_run(tmp_path / "run")
    with run_folder(output, "new", overwrite=True):
        save_checkpoint(output)
        remove_replaced(output)
    assert (output / "craft_config.json").read_text() == "new"
    assert names(tmp_path) == ["run"]
    assert names(output) == ["checkpoints", "craft.lock", "craft_config.json"]


def test_a_run_that_fails_before_a_checkpoint_gives_the_old_one_back(tmp_path: Path) -> None:
    output = old_run(tmp_path / "run")

    def fail() -> None:
        (output / "checkpoints").mkdir()  # of a checkpoint that could not be saved
        raise CraftError("NaN", why="", fix="")

    with pytest.raises(CraftError), run_folder(output, "new", overwrite=True):
        fail()
    assert (output / "craft_config.json").read_text() == "old"
    assert names(tmp_path) == ["run"]


def test_a_run_that_fails_after_a_checkpoint_keeps_both(tmp_path: Path) -> None:
    output = old_run(tmp_path / "run")

    def break_off() -> None:
        save_checkpoint(output)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), run_folder(output, "new", overwrite=True):
        break_off()
    assert (output / "checkpoints/last").is_dir()
    kept = replaced_run(output)
    assert kept
    assert (kept / "craft_config.json").read_text() == "old"
    with pytest.raises(CraftError, match=rf"kept in {kept}"):
        check_output(output, overwrite=False)
    remove_replaced(output)  # once it was resumed and is finished
    assert names(tmp_path) == ["run"]


def test_an_empty_folder_is_free(tmp_path: Path) -> None:
    check_output(tmp_path, overwrite=False)


def test_the_current_folder_is_a_folder_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with run_folder(Path(), "new", overwrite=False):
        pass
    assert (tmp_path / "craft_config.json").read_text() == "new"


def test_the_root_of_a_disk_is_refused() -> None:
    with pytest.raises(CraftError, match="root of a disk") as refused:
        check_output(Path("/"), overwrite=True)
    assert refused.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize("name", ["run.replaced", ".run.replaced", "run.partial"])
def test_neighbours_belong_to_the_user(tmp_path: Path, name: str) -> None:
    output = old_run(tmp_path / "run")
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("mine")
    with run_folder(output, "new", overwrite=True):
        save_checkpoint(output)
        remove_replaced(output)
    assert (tmp_path / name / "notes.txt").read_text() == "mine"
    assert names(tmp_path) == sorted([name, "run"])


@pytest.mark.parametrize(
    "mine",
    ["notes.txt", "checkpoints/notes.txt", "evaluations/a.csv", "checkpoints/000001/best/x.json"],
)
def test_a_run_with_files_of_the_user_is_not_replaced(tmp_path: Path, mine: str) -> None:
    output = old_run(tmp_path / "run")
    save_checkpoint(output)
    (output / "checkpoints/000001/craft_manifest.json").write_text('{"files": {"a.json": ""}}')
    for own in ("a.json", "../../metrics.jsonl", "../../tensorboard/events.1", "../../craft.lock"):
        (output / "checkpoints/000001" / own).parent.mkdir(exist_ok=True)
        (output / "checkpoints/000001" / own).touch()
    check_output(output, overwrite=True)
    (output / mine).parent.mkdir(exist_ok=True)
    (output / mine).write_text("mine")
    with (
        pytest.raises(CraftError, match=f"files that craft did not write.*{mine}"),
        run_folder(output, "new", overwrite=True),
    ):
        pass
    assert (output / mine).read_text() == "mine"
    assert names(tmp_path) == ["run"]


def test_a_link_of_the_user_in_a_run_is_not_removed(tmp_path: Path) -> None:
    output = old_run(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (output / "data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CraftError, match=r"files that craft did not write.*data"):
        check_output(output, overwrite=True)


KILLED = """
import os, signal, sys
from pathlib import Path
from craftcli.engine import run_folder as module
output, where = Path(sys.argv[1]), sys.argv[2]
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
if where == "renamed":
    Path.mkdir = die
if where == "created":
    module.write_text = die
with module.run_folder(output, "new", overwrite=True):
    if where == "saved":
        (output / "checkpoints/000001").mkdir(parents=True)
        (output / "checkpoints/last").symlink_to("000001")
    die()
"""


def killed(output: Path, where: str) -> None:
    """Replace a run in a process that is killed: at the rename, the first file, or later."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(output), where], check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("where", ["renamed", "created", "trained"])
def test_a_killed_run_without_a_checkpoint_loses_nothing(tmp_path: Path, where: str) -> None:
    output = old_run(tmp_path / "run")
    killed(output, where)
    note = recover_lost_run(output)
    assert note
    assert "recovered the run" in note
    assert (output / "craft_config.json").read_text() == "old"
    assert names(tmp_path) == ["run"]
    # The next try replaces it, and only at its end.
    with run_folder(output, "next", overwrite=True):
        assert len(names(tmp_path)) == 2
        save_checkpoint(output)
        remove_replaced(output)
    assert names(tmp_path) == ["run"]


def test_a_killed_run_with_a_checkpoint_is_kept_with_the_old_one(tmp_path: Path) -> None:
    output = old_run(tmp_path / "run")
    killed(output, "saved")
    assert recover_lost_run(output) is None
    kept = replaced_run(output)
    assert kept
    assert (kept / "craft_config.json").read_text() == "old"
    # A third run fails at once: both are still there.
    with pytest.raises(KeyboardInterrupt), run_folder(output, "next", overwrite=True):
        raise KeyboardInterrupt
    assert (output / "checkpoints/last").is_dir()
    assert replaced_run(output) == kept


def test_a_note_that_names_another_folder_removes_nothing(tmp_path: Path) -> None:
    output = old_run(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    for name in ("mine", "../mine", f".other.{'0' * 16}.replaced"):
        (output / "craft_replaces.json").write_text(json.dumps({"folder": name}))
        remove_replaced(output)
    assert names(tmp_path) == ["mine", "run"]


def test_two_starts_in_one_second_get_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noon(datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Noon":
            return cls(2026, 1, 2, 12, 0, 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "datetime", Noon)
    folders = [claim_output(TrainConfig(mode="hidden")) for _ in range(3)]
    names = ["20260102-120000-hidden", "20260102-120000-hidden-2", "20260102-120000-hidden-3"]
    assert folders == [Path("runs") / name for name in names]
    check_output(folders[0], overwrite=False)
    assert claim_output(TrainConfig(output=tmp_path / "own")) == tmp_path / "own"
    assert os.listdir(folders[0]) == []


def test_what_a_start_leaves_that_was_killed_before_its_settings_is_no_obstacle(
    tmp_path: Path,
) -> None:
    """SIGTERM while craft_config.json is written; found by the fault test, seed 355722."""
    folder = tmp_path / "run"
    folder.mkdir()
    left_over = folder / ".craft_config.json.0123456789abcdef.partial"
    left_over.write_text("{")
    check_output(folder, overwrite=False)
    with run_folder(folder, "{}", overwrite=False):
        assert (folder / "craft_config.json").is_file()
    (folder / "craft_config.json").unlink()
    left_over.rename(folder / "notes.partial")
    with pytest.raises(CraftError, match="not written by craft train"):
        check_output(folder, overwrite=True)
