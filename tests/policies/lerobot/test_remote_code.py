"""Code that comes with a tokenizer runs only if the user allows it."""

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
from craftcli.policies.lerobot.checkpoint import load_checkpoint

CODE = """
from pathlib import Path
from craftcli.demo.tokenizers import FastActionTokenizer

Path({marker!r}).write_text("ran")


class Foreign(FastActionTokenizer):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's policy with an action tokenizer with code, and the file that it writes."""
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


def test_a_file_that_the_user_names_may_allow_it(marker: Path, craft: Callable[..., Any]) -> None:
    Path("train.toml").write_text("trust_remote_code = true\n")
    small = ("--mode", "none", "--steps", "1", "--batch-size", "2", "--device", "cpu")
    assert craft("train", *small, "--config", "train.toml").exit_code == 0
    assert marker.exists()


def test_a_run_does_not_trust_itself(marker: Path, craft: Callable[..., Any]) -> None:
    """Its settings say trust_remote_code, but a folder cannot allow its own code to run.

    The teacher needs that code too, as LeRobot's own pi0_fast does.
    """
    small, trust = ("--device", "cpu", "--batch-size", "2"), "--trust-remote-code"
    built = craft("cache", "build", *small, trust, "--kind", "hidden", "--samples", "4")
    assert built.exit_code == 0, built.output
    flags = ("--mode", "hidden", "--anchor-batch-size", "2", "--steps", "1", "-o", "run")
    assert craft("train", *small, *flags).exit_code == 2
    assert craft("train", *small, trust, *flags).exit_code == 0
    checkpoint = "run/checkpoints/last/pretrained_model"
    shutil.copytree(checkpoint, "alone")
    assert json.loads(Path("run/craft_config.json").read_text())["trust_remote_code"] is True
    cache = ("--cache", "anchors.zarr", "--json")
    marker.unlink()
    for untrusted in (
        ("eval", "alone", *small, *cache),
        ("eval", "run", *small, *cache),
        ("train", "--resume", "run"),
        ("merge", "run", "--alpha", "0.5", "-o", "between"),
        ("info", "--policies", "--policy", "run"),
    ):
        refused = craft(*untrusted)
        assert refused.exit_code == 2, refused.output
        assert "--trust-remote-code" in refused.stderr
    assert not marker.exists()
    for source in ("alone", "run"):
        evaluated = craft("eval", source, *small, *cache, trust)
        assert evaluated.exit_code == 0, evaluated.output
        found = json.loads(evaluated.stdout)
        assert found["drift"]["action"]["kind"] == "chunk_nmse"
        assert found["left_out"] == []
