"""What a run reads outside its folder is compared to the byte when it is resumed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import smolvla
from tiny.world import CAMERAS, write_dataset
from typer.testing import CliRunner

from craftcli.cli.app import app
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.engine.checkpoint_manifest import CheckpointManifest
from craftcli.errors import EXIT_CHECK_FAILED
from craftcli.policies.lerobot.datasets import open_recorded_dataset
from craftcli.policies.lerobot.identity import dataset_identity
from craftcli.sealed_json import sealed

SHORT = ("--steps", 4, "--save-every", 2, "--batch-size", 2, "--device", "cpu", "--mode", "none")
LORA = ("--lora", "r=2,alpha=4,targets=q_proj")
TABLE = "data/chunk-000/file-000.parquet"


def cut(run: Path) -> Path:
    """The run as it was after its second step."""
    shutil.rmtree(run / "checkpoints/000004")
    (run / "checkpoints/last").unlink()
    (run / "checkpoints/last").symlink_to("000002")
    return run


@pytest.fixture(scope="module")
def trained(new_data: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, a policy, and a LoRA run of both that was interrupted."""
    folder = tmp_path_factory.mktemp("trained") / "before"
    shutil.copytree(new_data.root, folder / "data")
    shutil.copytree(TEACHER_FOLDER, folder / "base")
    where = ("--policy", folder / "base", "--dataset", folder / "data", "-o", folder / "run")
    arguments = [str(a) for a in ("train", *SHORT, *LORA, *where)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    cut(folder / "run")
    # Moved as a whole, so that its copies find what lies beside them.
    return folder.rename(folder.with_name("after"))


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy", symlinks=True))


def fingerprint(data: Path) -> str:
    return dataset_identity(open_recorded_dataset("data", str(data)), []).fingerprint


def change_row(data: Path, row: int) -> None:
    """Another action in one row of the table."""
    table = pq.read_table(data / TABLE)
    actions = table.column("action").to_pylist()
    actions[row] = [-value - 0.5 for value in actions[row]]
    changed = pa.array(actions, type=table.column("action").type)
    number = table.column_names.index("action")
    pq.write_table(table.set_column(number, table.field("action"), changed), data / TABLE)


def edit_json(file: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def states(craft: Callable[..., Any], run: Path) -> dict[str, tuple[str, str | None]]:
    result = craft("inspect", run, "--json")
    assert result.exit_code == 0, result.output
    return {d["kind"]: (d["state"], d["why"]) for d in json.loads(result.stdout)["depends"]}


def as_earlier_versions_wrote(run: Path) -> None:
    """Leave out of the manifest what version 1 of it did not have."""
    file = run / "checkpoints/last/craft_manifest.json"
    content = json.loads(file.read_text())
    assert content.pop("format") == 2
    del content["digest"]
    for dependency in content["depends"].values():
        del dependency["files"]
    file.write_text(json.dumps({"format": 1, **sealed(content)}))


def test_one_row_in_the_middle_is_noticed(craft: Callable[..., Any], folder: Path) -> None:
    before = fingerprint(folder / "data")
    change_row(folder / "data", 211)
    assert fingerprint(folder / "data") == before  # the digest of 8 rows does not show it
    named = f"{TABLE} has changed"
    assert states(craft, folder / "run")["dataset"] == ("changed", named)
    result = craft("train", "--resume", folder / "run")
    assert result.exit_code == EXIT_CHECK_FAILED, result.output
    assert f"the dataset data is not the one of the checkpoint ({named})" in result.stderr
    assert craft("train", "--resume", folder / "run", "--accept-changes").exit_code == 0
    # From here on the run depends on the data as it is now.
    assert states(craft, folder / "run")["dataset"] == ("unchanged", None)


@pytest.mark.parametrize("change", ["stats", "added", "gone"])
def test_every_file_of_the_dataset_counts(
    craft: Callable[..., Any], folder: Path, change: str
) -> None:
    data = folder / "data"
    if change == "stats":
        edit_json(data / "meta/stats.json", lambda s: s["action"].update(mean=[9.0, 9.0]))
        named = "meta/stats.json has changed"
    elif change == "added":
        shutil.copy(data / TABLE, data / "data/chunk-000/file-001.parquet")
        named = "data/chunk-000/file-001.parquet was added"
    else:
        (data / "meta/stats.json").unlink()
        named = "meta/stats.json is missing"
    assert states(craft, folder / "run")["dataset"] == ("changed", named)


def test_the_time_of_a_file_does_not_count(craft: Callable[..., Any], folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_relative_to(folder / "run"):
            os.utime(file, (1e9, 1e9))
    assert set(states(craft, folder / "run").values()) == {("unchanged", None)}
    result = craft("train", "--resume", folder / "run")
    assert result.exit_code == 0, result.output
    assert "does not notice" not in result.output


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", lambda config: config.update(n_action_steps=1)),
        ("policy_preprocessor.json", lambda config: config.update(name="another")),
        ("text_tokenizer/tokenizer_config.json", lambda config: config.update(added=True)),
    ],
)
def test_a_file_of_the_policy_under_lora_weights_is_named(
    craft: Callable[..., Any], folder: Path, file: str, change: Callable[[Any], object]
) -> None:
    edit_json(folder / "base" / file, change)
    named = f"{file} has changed"
    assert states(craft, folder / "run")["lora_base"] == ("changed", named)
    result = craft("train", "--resume", folder / "run")
    assert result.exit_code == EXIT_CHECK_FAILED, result.output
    assert "the policy under the LoRA weights" in result.stderr
    assert f"({named})" in " ".join(result.stderr.split())


def test_a_changed_policy_under_lora_weights_is_not_opened(
    craft: Callable[..., Any], folder: Path
) -> None:
    """By `eval` and others, which open the policy of a run."""
    (folder / "base/README.md").write_text("notes do not count")
    assert craft("info", "--policies", "--policy", folder / "run").exit_code == 0
    edit_json(folder / "base/config.json", lambda config: config.update(n_action_steps=1))
    for command in (("eval",), ("info", "--policies", "--policy")):
        result = craft(*command, folder / "run")
        assert result.exit_code == EXIT_CHECK_FAILED, result.output
        said = " ".join(result.stderr.split())
        assert "the policy under the LoRA weights in" in said
        assert "(config.json has changed)" in said


def test_a_changed_policy_under_lora_weights_of_an_earlier_version_is_not_opened(
    craft: Callable[..., Any], folder: Path
) -> None:
    as_earlier_versions_wrote(folder / "run")
    with (folder / "base/model.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"xyz")
    result = craft("info", "--policies", "--policy", folder / "run")
    assert result.exit_code == EXIT_CHECK_FAILED, result.output
    assert "is another" in result.stderr


def test_a_replaced_video_is_noticed(craft: Callable[..., Any], tmp_path: Path) -> None:
    policy = smolvla.make(tmp_path / "policy")
    data = write_dataset(tmp_path / "data", videos=True)
    other = write_dataset(tmp_path / "other", videos=True, seed=6)
    result = craft("train", *SHORT, "--policy", policy, "--dataset", data, "-o", "run")
    assert result.exit_code == 0, result.output
    run, before = cut(tmp_path / "run"), fingerprint(data)
    video = f"videos/{CAMERAS[1]}/chunk-000/file-000.mp4"
    shutil.copy(other / video, data / video)
    assert fingerprint(data) == before  # which has no pixels of videos
    assert states(craft, run)["dataset"] == ("changed", f"{video} has changed")
    result = craft("train", "--resume", run)
    assert result.exit_code == EXIT_CHECK_FAILED, result.output
    assert video in "".join(result.stderr.split())


def test_a_checkpoint_of_an_earlier_version_says_what_it_does_not_cover(
    craft: Callable[..., Any], folder: Path
) -> None:
    as_earlier_versions_wrote(folder / "run")
    change_row(folder / "data", 211)
    found = states(craft, folder / "run")
    assert [state for state, _ in found.values()] == ["unchanged", "unchanged"]
    assert "compared only 8 rows of it" in str(found["dataset"][1])
    assert "compared only its weights" in str(found["lora_base"][1])
    result = craft("train", "--resume", folder / "run")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "--resume does not notice every change of the dataset data: an earlier" in said
    # The next checkpoint has all digests.
    manifest = CheckpointManifest.read(folder / "run/checkpoints/last")
    assert manifest
    assert manifest.uncovered() == []


def test_a_checkpoint_of_an_earlier_version_is_still_compared(
    craft: Callable[..., Any], folder: Path
) -> None:
    as_earlier_versions_wrote(folder / "run")
    change_row(folder / "data", 0)
    assert states(craft, folder / "run")["dataset"] == ("changed", None)
    result = craft("train", "--resume", folder / "run")
    assert result.exit_code == EXIT_CHECK_FAILED, result.output
    assert "the dataset data is not the one of the checkpoint" in result.stderr


def test_data_too_large_to_be_read_whole_is_said(
    craft: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from craftcli.engine import file_digests, outside

    monkeypatch.setattr(outside, "WHOLE_BYTES", 0)
    monkeypatch.setattr(file_digests, "PART_BYTES", 64)
    where = ("--policy", folder / "base", "--dataset", folder / "data", "-o", "large")
    result = craft("train", *SHORT, *where)
    assert result.exit_code == 0, result.output
    said = "it is large: of 5 of its 5 files only the size and 4 parts of 1 MiB are compared"
    assert said in " ".join(result.output.split())
    assert states(craft, Path("large")) == {"dataset": ("unchanged", said)}
    with (folder / "data" / TABLE).open("r+b") as file:  # its first part
        file.write(b"X")
    named = f"{TABLE} has changed"
    assert states(craft, Path("large")) == {"dataset": ("changed", named)}
