"""Which policies read instructions, and where old instructions are read from."""

import json
from pathlib import Path

import pytest
from tiny.act import ACT
from tiny.diffusion import DIFFUSION
from tiny.family import Family
from tiny.multi_task_dit import FLOWED
from tiny.pi0_fast import PI0_FAST
from tiny.smolvla import SMOLVLA
from tiny.world import TASKS, write_dataset
from tiny.xvla import XVLA

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.instructions import (
    instructions_of_frames,
    read_instructions,
    reads_instructions,
)
from craftcli.sources import DataSource


@pytest.mark.parametrize(
    ("family", "reads"),
    [
        (ACT, False),
        (DIFFUSION, False),
        (FLOWED, True),
        (SMOLVLA, True),
        (PI0_FAST, True),
        (XVLA, True),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_which_policies_read_instructions(family: Family, reads: bool, tmp_path: Path) -> None:
    policy = load_checkpoint(str(family.make(tmp_path / "policy")), device="cpu")
    assert reads_instructions(policy) is reads


def test_a_file_has_one_instruction_a_line(tmp_path: Path) -> None:
    file = tmp_path / "old.txt"
    file.write_text("  push it \n\nlift it\npush it\n")
    assert read_instructions(str(file)) == ("push it", "lift it")


def test_a_dataset_is_asked_for_its_tasks_without_its_frames(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "old")
    for file in (root / "data").rglob("*.parquet"):
        file.unlink()
    assert read_instructions(str(root)) == TASKS


def test_the_instruction_of_each_frame(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    policy = load_checkpoint(str(ACT.make(tmp_path / "policy")), device="cpu")
    dataset = DataSource(repo_id=str(root)).open(policy.policy.config, {})
    assert instructions_of_frames(dataset, [0, 8, 7]) == [TASKS[0], TASKS[1], TASKS[0]]
    assert instructions_of_frames(dataset, [9])[0] == dataset[9]["task"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "there is no such file or folder, and it is no name on the Hub"),
        (b"\n  \n", "it has no instruction"),
        (b"\xff\xfe\xff", "codec can't decode"),
        ("folder", "the folder has no meta/info.json"),
        ("damaged", "a file of its metadata is missing or damaged"),
    ],
    ids=["absent", "empty", "not text", "no dataset", "damaged"],
)
def test_what_cannot_be_read_is_refused(
    content: bytes | str | None, why: str, tmp_path: Path
) -> None:
    source = tmp_path / "old"
    if isinstance(content, bytes):
        source.write_bytes(content)
    elif content == "folder":
        source.mkdir()
    elif content == "damaged":
        (write_dataset(source) / "meta/tasks.parquet").write_bytes(b"no table")
    with pytest.raises(CraftError, match="Cannot read the old instructions") as refused:
        read_instructions(str(source))
    assert why in refused.value.why
    assert "--old-tasks" in refused.value.fix
    assert refused.value.exit_code == EXIT_USAGE


def test_a_dataset_of_another_format_says_so(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "old")
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps({**info, "codebase_version": "v2.1"}))
    with pytest.raises(CraftError, match="is in another format"):
        read_instructions(str(root))
