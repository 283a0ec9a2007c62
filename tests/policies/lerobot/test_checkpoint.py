"""A checkpoint opens completely or not at all."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from craftcli.demo import configuration_tiny_pi0_fast
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.tokenizers import tokenizer_folders
from craftcli.errors import CraftError
from craftcli.policies.lerobot.checkpoint import load_checkpoint


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TEACHER_FOLDER, tmp_path / "teacher"))


def rewrite_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_a_tokenizer_of_words_is_none_of_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers opens it without a word; LeRobot would fail at the first batch."""
    words, _ = tokenizer_folders(TEACHER_FOLDER)
    monkeypatch.setattr(configuration_tiny_pi0_fast, "tokenizer_folders", lambda _: (words, words))
    with pytest.raises(CraftError, match="cannot turn actions into tokens") as caught:
        load_checkpoint(str(TEACHER_FOLDER), device="cpu")
    assert caught.value.why == f"its action tokenizer, {words}, is one of words."
    assert "action_tokenizer_name" in caught.value.fix


def test_a_copy_elsewhere_opens_and_finds_its_tokenizers(copied: Path, teacher: Any) -> None:
    opened = load_checkpoint(str(copied), device="cpu")
    for name, tensor in opened.policy.state_dict().items():
        assert torch.equal(tensor, teacher.policy.state_dict()[name])


@pytest.mark.parametrize("damage", ["missing", "shape", "truncated", "absent"])
def test_weights_that_do_not_load_are_found(copied: Path, damage: str) -> None:
    """LeRobot's pi0_fast would continue with random weights."""
    file = copied / "model.safetensors"
    name = next(iter(load_file(file)))
    if damage == "missing":
        rewrite_weights(copied, lambda weights: weights.pop(name))
    elif damage == "shape":
        rewrite_weights(copied, lambda weights: weights.update({name: torch.zeros(3)}))
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        file.unlink()
    with pytest.raises(CraftError) as caught:
        load_checkpoint(str(copied), device="cpu")
    assert "weights" in caught.value.what


@pytest.mark.parametrize(("name", "layers"), [("depth", 2), ("vision_depth", 1)])
def test_weights_of_more_layers_than_the_policy_has_are_refused(
    copied: Path, name: str, layers: int
) -> None:
    """All tensors of such a policy are loaded; those of its other layers are forgotten."""
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, name: layers}))
    with pytest.raises(CraftError, match="smaller than its weights") as caught:
        load_checkpoint(str(copied), device="cpu")
    assert f"layers.{layers}." in caught.value.why


def test_weights_that_nobody_needs_are_named(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite_weights(copied, lambda w: w.update({"model.extra\x1b[2J": torch.zeros(2)}))
    load_checkpoint(str(copied), device="cpu")
    assert r"1 tensors of" in caplog.text
    assert r"'model.extra\x1b[2J'" in caplog.text


def test_a_checkpoint_that_saves_only_the_head_is_complete(copied: Path) -> None:
    """As converted ones do; LeRobot fills the embedding from it."""
    rewrite_weights(
        copied,
        lambda w: w.pop(next(name for name in w if name.endswith("embed_tokens.weight"))),
    )
    opened = load_checkpoint(str(copied), device="cpu").policy.model.paligemma_with_expert
    head = opened.paligemma.lm_head.weight
    assert torch.equal(opened.paligemma.model.language_model.embed_tokens.weight, head)


def test_a_missing_processor_is_named(copied: Path) -> None:
    (copied / "policy_preprocessor.json").unlink()
    with pytest.raises(CraftError, match=r"cannot be opened.*policy_preprocessor\.json"):
        load_checkpoint(str(copied), device="cpu")


def test_a_folder_without_a_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CraftError, match=r"No policy at .*config\.json"):
        load_checkpoint(str(tmp_path), device="cpu")


def test_a_name_that_the_hub_does_not_give_is_refused() -> None:
    with pytest.raises(CraftError, match="Cannot open the policy 'nobody/nothing'"):
        load_checkpoint("nobody/nothing", device="cpu")


def test_another_type_than_the_weights_are_of_is_refused(copied: Path) -> None:
    config = copied / "config.json"
    config.write_text('{"type": "tdmpc"}')
    with pytest.raises(CraftError, match="cannot be opened"):
        load_checkpoint(str(copied), device="cpu")


def test_an_unreadable_configuration_is_refused(copied: Path) -> None:
    (copied / "config.json").write_text('{"type": "no_such_policy"}')
    with pytest.raises(CraftError, match="Cannot read the policy configuration"):
        load_checkpoint(str(copied), device="cpu")
