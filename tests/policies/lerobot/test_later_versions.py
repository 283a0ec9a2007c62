"""Checkpoints as LeRobot's main writes them after 0.6.1, made by hand: all supported versions open.

Read in LeRobot's main of 2026-08-23: `DataProcessorPipeline._save_pretrained` (artifacts),
`save_checkpoint` (checkpoint_format) and the end of a step in lerobot_train.py (EMA).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from made.hostile_policy import edit_json
from safetensors.torch import load_file, save_file
from tiny import pi05
from tiny.act import STATE_ONLY
from tiny.inputs import SEEDS, processed
from tiny.pi05 import PI05
from tiny.world import CAMERAS, PX, STATE

from craftcli.errors import CraftError
from craftcli.policies.base import FeatureRequest
from craftcli.policies.families.pi05 import Pi05Adapter
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.identity import processor_digest, same_processors
from craftcli.policies.lerobot.weight_files import WEIGHTS_FILE

TOKENS = "observation.language.tokens"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pi05 that names its tokenizer, as 0.6.1 writes it."""
    folder = PI05.make(tmp_path_factory.mktemp("older") / "policy")
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)  # if LeRobot is a later one
    name_tokenizer(folder, str(folder / "text_tokenizer"), saved=False)
    return folder


@pytest.fixture
def later(older: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with the tokenizer as an artifact, seen from a folder that has none."""
    folder = Path(shutil.copytree(older, tmp_path / "later"))
    (folder / "text_tokenizer").rename(folder / "tokenizer")
    name_tokenizer(folder, "tokenizer", saved=True)
    monkeypatch.chdir(tmp_path)
    return folder


def name_tokenizer(folder: Path, name: Any, *, saved: bool) -> None:
    file = folder / "policy_preprocessor.json"
    content = json.loads(file.read_text())
    (step,) = (s for s in content["steps"] if s.get("registry_name") == "tokenizer_processor")
    step["config"]["tokenizer_name"] = name
    step["artifacts"] = {"tokenizer_name": name} if saved else {}
    file.write_text(json.dumps(content))


def frame() -> dict[str, Any]:
    chance = torch.Generator().manual_seed(0)
    images = {camera: torch.rand(3, PX, PX, generator=chance) for camera in CAMERAS}
    return {**images, "observation.state": torch.zeros(STATE), "task": "push the red block"}


def test_a_tokenizer_saved_with_the_checkpoint_is_taken(older: Path, later: Path) -> None:
    one, two = (load_checkpoint(str(folder), device="cpu") for folder in (older, later))
    expected, found = (opened.preprocess(frame())[TOKENS] for opened in (one, two))
    assert torch.equal(found, expected)
    assert (found != 0).sum() > 4  # words, not only padding
    names = [getattr(step, "tokenizer_name", None) for step in two.preprocess.steps]
    assert str(later / "tokenizer") in names


def test_a_copy_of_the_tokenizer_makes_no_other_processor(older: Path, later: Path) -> None:
    one, two = (load_checkpoint(str(folder), device="cpu").preprocess for folder in (older, later))
    assert processor_digest(one) != processor_digest(two)  # of caches: their digests stay as built
    assert same_processors(one, two)
    words = later / "tokenizer/tokenizer.json"
    words.write_text(words.read_text().replace('"push"', '"pull"'))
    assert not same_processors(one, load_checkpoint(str(later), device="cpu").preprocess)


def test_a_tokenizer_that_was_not_copied_along_is_named(later: Path) -> None:
    shutil.rmtree(later / "tokenizer")
    with pytest.raises(CraftError, match=r"not complete.*processor\.json names tokenizer"):
        load_checkpoint(str(later), device="cpu")


@pytest.mark.parametrize("path", ["../tokenizer", "/tokenizer", "a/../../b", 3])
def test_a_tokenizer_outside_the_folder_is_refused(later: Path, path: Any) -> None:
    name_tokenizer(later, path, saved=True)
    with pytest.raises(CraftError, match=r"Refusing to open.*not in the policy's folder"):
        load_checkpoint(str(later), device="cpu")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of lerobot-train with a moving average of the weights."""
    step = tmp_path / "run/checkpoints/000002"
    trained = STATE_ONLY.make(step / "pretrained_model")
    averaged = Path(shutil.copytree(trained, step / "pretrained_model_ema"))
    weights = {name: tensor / 2 for name, tensor in load_file(trained / WEIGHTS_FILE).items()}
    save_file(weights, averaged / WEIGHTS_FILE, metadata={"format": "pt"})
    (step.parent / "last").symlink_to(step.name)
    return tmp_path / "run"


def test_trained_weights_are_taken_and_averaged_ones_are_named(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = run / "checkpoints/000002"
    policies = {
        source: load_checkpoint(str(source), device="cpu").policy.state_dict()
        for source in (run, step, step / "pretrained_model", step / "pretrained_model_ema")
    }
    noted = [record.getMessage() for record in caplog.records if "EMA" in record.getMessage()]
    assert len(noted) == 3
    assert all(f"--policy {step.resolve() / 'pretrained_model_ema'} takes" in m for m in noted)
    trained, averaged = policies[run], policies[step / "pretrained_model_ema"]
    saved = load_file(step / "pretrained_model" / WEIGHTS_FILE)
    for name, tensor in saved.items():
        assert torch.equal(trained[name], tensor)
        assert torch.equal(averaged[name], tensor / 2)


def test_weights_in_shards_name_the_command_that_joins_them(run: Path) -> None:
    folder = run / "checkpoints/000002/pretrained_model"
    (folder / "pytorch_model_fsdp_0").mkdir()
    (folder / "pytorch_model_fsdp_0/.metadata").write_bytes(b"")
    load_checkpoint(str(folder), device="cpu")  # --checkpoint_format safetensors_dcp
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(CraftError, match=r"in shards") as caught:
        load_checkpoint(str(run), device="cpu")
    assert f"lerobot-convert-dcp --checkpoint_dir={folder.resolve()}" in caught.value.fix


def test_a_setting_of_a_later_version_is_named_with_the_installed_one(later: Path) -> None:
    edit_json(later / "config.json", setting_of_tomorrow=True)
    with pytest.raises(CraftError, match=r"setting_of_tomorrow") as caught:
        load_checkpoint(str(later), device="cpu")
    assert "later than the installed 0." in caught.value.fix


@pytest.mark.parametrize("memory", ["use_visual_memory", "use_proprioceptive_memory"])
def test_a_pi05_with_memory_is_refused(memory: str) -> None:
    policy, adapter = pi05.policy().eval(), Pi05Adapter()
    batch = adapter.anchor_inputs(policy, processed(policy), seeds=SEEDS, own_actions=False)
    setattr(policy.config, memory, True)
    with pytest.raises(CraftError, match=f"cannot be retained.*{memory}"):
        adapter.features(policy, batch, FeatureRequest(stack="vlm", layers=(0,)))
