"""Code that comes with a tokenizer is never run unasked."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import dynamic_module_utils

from craftcli.demo import configuration_tiny_pi0_fast
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.tokenizers import tokenizer_folders
from craftcli.errors import CraftError
from craftcli.policies.loading import load_checkpoint

CODE = """
from pathlib import Path
from craftcli.demo.tokenizers import FastActionTokenizer

Path({marker!r}).write_text("ran")


class Foreign(FastActionTokenizer):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's policy with an action tokenizer that brings code; the file this code writes."""
    folders = tmp_path / "tokenizers"
    for folder in tokenizer_folders(TEACHER_FOLDER):
        shutil.copytree(folder, folders / folder.name)
    action = tokenizer_folders(folders)[1]
    settings = json.loads((action / "processor_config.json").read_text())
    settings["processor_class"] = "Foreign"
    settings["auto_map"] = {"AutoProcessor": "foreign.Foreign"}
    (action / "processor_config.json").write_text(json.dumps(settings))
    (action / "foreign.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    monkeypatch.setattr(
        configuration_tiny_pi0_fast, "tokenizer_folders", lambda _: tokenizer_folders(folders)
    )
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "marker"


def test_it_is_refused_and_nothing_of_it_runs(marker: Path) -> None:
    with pytest.raises(CraftError, match=r"brings its own Python code.*--trust-remote-code"):
        load_checkpoint(str(TEACHER_FOLDER), device="cpu")
    assert not marker.exists()


def test_it_runs_when_the_user_says_so(marker: Path) -> None:
    opened = load_checkpoint(str(TEACHER_FOLDER), device="cpu", trust_remote_code=True)
    assert marker.read_text() == "ran"
    assert type(opened.policy.action_tokenizer).__name__ == "Foreign"


def test_the_command_has_the_flag(marker: Path, craft: Callable[..., Any]) -> None:
    small = ("cache", "build", "--samples", "2", "--device", "cpu")
    refused = craft(*small)
    assert refused.exit_code == 2
    assert "--trust-remote-code" in refused.stderr
    assert not marker.exists()
    assert craft(*small, "--trust-remote-code").exit_code == 0
    assert marker.exists()


def test_a_trusted_run_is_evaluated_beside_its_teacher(
    marker: Path, craft: Callable[..., Any]
) -> None:
    """The teacher needs that code too, as LeRobot's own pi0_fast does."""
    small, trust = ("--device", "cpu", "--batch-size", "2"), "--trust-remote-code"
    built = craft("cache", "build", *small, trust, "--kind", "hidden", "--samples", "4")
    assert built.exit_code == 0, built.output
    flags = ("--mode", "hidden", "--anchor-batch-size", "2", "--steps", "1", "-o", "run")
    assert craft("train", *small, *flags).exit_code == 2
    assert craft("train", *small, trust, *flags).exit_code == 0
    checkpoint = "run/checkpoints/last/pretrained_model"
    shutil.copytree(checkpoint, "alone")
    cache = ("--cache", "anchors.zarr", "--json")
    assert craft("eval", "alone", *small, *cache).exit_code == 2
    for evaluated in (
        craft("eval", "alone", *small, *cache, trust),
        craft("eval", "run", *small, *cache),  # trusted when it was trained
    ):
        assert evaluated.exit_code == 0, evaluated.output
        found = json.loads(evaluated.stdout)
        assert found["drift"]["action"]["kind"] == "chunk_nmse"
        assert found["left_out"] == []
