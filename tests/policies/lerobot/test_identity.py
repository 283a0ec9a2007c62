"""Digests change with what matters, and with nothing else."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.identity import (
    config_digest,
    dataset_identity,
    processor_digest,
    teacher_identity,
    weights_digest,
)


def test_a_copy_has_the_same_identity(teacher: Any, tmp_path: Path) -> None:
    copy = shutil.copytree(TEACHER_FOLDER, tmp_path / "copy")
    one = teacher_identity(teacher)
    two = teacher_identity(load_checkpoint(str(copy), device="cpu"))
    for field in ("weights_digest", "config_digest", "processor_digest"):
        assert getattr(one, field) == getattr(two, field)


def test_a_single_weight_changes_the_digest(tmp_path: Path) -> None:
    weights = load_file(TEACHER_FOLDER / "model.safetensors")
    save_file(weights, tmp_path / "same.safetensors")
    first = next(iter(weights))
    weights[first].view(-1)[0] += 1e-3
    save_file(weights, tmp_path / "other.safetensors")
    original = weights_digest(TEACHER_FOLDER / "model.safetensors")
    assert weights_digest(tmp_path / "same.safetensors") == original
    assert weights_digest(tmp_path / "other.safetensors") != original


@pytest.mark.parametrize(
    ("key", "value", "same"),
    [
        ("device", "cuda", True),
        ("optimizer_lr", 1.0, True),
        ("temperature", 0.5, True),
        ("n_action_steps", 1, True),
        ("chunk_size", 9, False),
    ],
)
def test_only_settings_that_matter_change_the_config_digest(
    tmp_path: Path, key: str, value: Any, same: bool
) -> None:
    config = json.loads((TEACHER_FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    unchanged = config_digest(TEACHER_FOLDER / "config.json")
    assert (config_digest(tmp_path / "config.json") == unchanged) is same


def test_other_statistics_are_another_processor(teacher: Any, student: Any) -> None:
    before = processor_digest(student.preprocess)
    assert before == processor_digest(teacher.preprocess)
    state = student.preprocess.state_dict()
    name = next(iter(state))
    state[name] = {k: v + torch.ones_like(v) for k, v in state[name].items()}
    student.preprocess.load_state_dict(state)
    assert processor_digest(student.preprocess) != before


def test_dataset_identity_tells_datasets_and_selections_apart(old_data: Any, new_data: Any) -> None:
    old, new = dataset_identity(old_data, [1, 2]), dataset_identity(new_data, [1, 2])
    assert old.fingerprint != new.fingerprint
    assert old.fingerprint == dataset_identity(old_data, [3]).fingerprint
    assert old.selection_digest != dataset_identity(old_data, [1, 3]).selection_digest
