"""A policy folder chooses among known processor steps; it never makes craft import or call more."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.processor import ProcessorStepRegistry
from lerobot.processor.pipeline import IdentityProcessorStep
from lerobot.rewards.classifier.configuration_classifier import RewardClassifierConfig
from made.hostile_policy import add_step, edit_json, popen_step
from transformers import BarkConfig, BarkModel, dynamic_module_utils

from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.errors import CraftError
from craftcli.policies.lerobot.checkpoint import load_checkpoint


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TEACHER_FOLDER, tmp_path / "policy"))


class OwnStep(IdentityProcessorStep):
    """A step that a user's own program defines and does not register."""


def refusal(policy: Path) -> str:
    with pytest.raises(CraftError) as caught:
        load_checkpoint(str(policy), device="cpu")
    assert "Refusing to open the policy" in caught.value.what
    return caught.value.why


@pytest.mark.parametrize(
    "file", ["policy_preprocessor.json", "policy_postprocessor.json", "another_processor.json"]
)
def test_a_program_is_refused_in_every_processor_file(
    policy: Path, tmp_path: Path, file: str
) -> None:
    add_step(policy, popen_step(tmp_path / "marker"), file=file)
    why = refusal(policy)
    assert f"in {file}, step 0 names the class 'subprocess.Popen'" in why
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "name",
    [
        "lerobot.processor.pipeline.Path",  # reachable through a module of LeRobot, yet no step
        "lerobot.scripts.lerobot_train.train",
        "builtins.eval",
        "Popen",
        "",
        ["subprocess.Popen"],
        None,
    ],
)
def test_a_class_must_be_a_processor_step(policy: Path, name: Any) -> None:
    add_step(policy, {"class": name, "config": {}})
    assert "which is not a processor step" in refusal(policy)


def test_nothing_is_imported_because_a_file_names_it(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "planted.py").write_text(f"open({str(marker)!r}, 'w')\nclass Step: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    add_step(policy, {"class": "planted.Step", "config": {}})
    refusal(policy)
    assert "planted" not in sys.modules
    assert not marker.exists()


@pytest.mark.parametrize("name", ["nobody_has_this_step", ["x"], None])
def test_a_name_must_be_registered(policy: Path, name: Any) -> None:
    add_step(policy, {"registry_name": name, "config": {}})
    assert "nobody registered" in refusal(policy)


@pytest.mark.parametrize("registered", [True, False])
def test_steps_of_installed_code_open(policy: Path, registered: bool) -> None:
    """LeRobot writes the class of a step that is not registered."""
    entry = {"class": f"{OwnStep.__module__}.OwnStep", "config": {}}
    if registered:
        ProcessorStepRegistry.register("own_step")(OwnStep)
        entry = {"registry_name": "own_step", "config": {}}
    try:
        add_step(policy, entry)
        opened = load_checkpoint(str(policy), device="cpu")
        assert type(opened.preprocess.steps[0]) is OwnStep
    finally:
        ProcessorStepRegistry.unregister("own_step")


def test_a_step_reads_no_file_outside_the_folder(policy: Path) -> None:
    step = {"registry_name": "device_processor", "config": {}, "state_file": "../a.safetensors"}
    add_step(policy, step)
    assert "'../a.safetensors', a file outside" in refusal(policy)


def test_a_type_must_be_registered(policy: Path) -> None:
    edit_json(policy / "config.json", type="subprocess.Popen")
    with pytest.raises(CraftError, match=r"Policy type 'subprocess\.Popen' .* is not registered"):
        load_checkpoint(str(policy), device="cpu")


def test_a_step_that_loads_its_tokenizer_later_runs_no_remote_code(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LeRobot's step for GR00T does, at its first batch, and any policy may list it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker, folder = tmp_path / "marker", tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "planted.py").write_text(f"open({str(marker)!r}, 'w')\nclass Words: pass\n")
    settings = {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": ["planted.Words", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    name = "groot_n1_7_vlm_encode_v1"
    add_step(policy, {"registry_name": name, "config": {"model_name": str(folder)}})
    with pytest.raises(CraftError, match="brings its own Python code"):
        load_checkpoint(str(policy), device="cpu")
    assert not marker.exists()


def test_lora_weights_import_no_module(policy: Path) -> None:
    (policy / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(TEACHER_FOLDER), "megatron_config": {"a": 1}})
    )
    assert "megatron_core" in refusal(policy)


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "XLORA", ["LORA"]])
def test_only_lora_weights_are_attached(policy: Path, kind: Any) -> None:
    """Other kinds of PEFT open tokenizers and weights that the file names."""
    (policy / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(TEACHER_FOLDER), "peft_type": kind})
    )
    assert "craft opens LORA alone" in refusal(policy)


@pytest.mark.parametrize("steps", [{"0": {}}, "class", None, 3, [["class"]], [popen_step(Path())]])
def test_steps_are_a_list_of_steps(policy: Path, steps: Any) -> None:
    edit_json(policy / "policy_postprocessor.json", steps=steps)
    assert "in policy_postprocessor.json, step" in refusal(policy)
    edit_json(policy / "policy_postprocessor.json", steps=[])
    # As LeRobot's own training writes it.
    (policy / "train_config.json").write_text(json.dumps({"steps": 100}))
    load_checkpoint(str(policy), device="cpu")


def test_a_linked_file_is_read_where_it_is(policy: Path, tmp_path: Path) -> None:
    add_step(policy, popen_step(tmp_path / "marker"))
    (policy / "policy_preprocessor.json").rename(tmp_path / "elsewhere")
    (policy / "policy_preprocessor.json").symlink_to(tmp_path / "elsewhere")
    assert "names the class 'subprocess.Popen'" in refusal(policy)


def save_model_with_code(folder: Path, marker: Path) -> None:
    """A model of a kind that transformers knows, with a way of its own to generate."""
    size = {"block_size": 8, "input_vocab_size": 8, "output_vocab_size": 8}
    size |= {"num_layers": 1, "num_heads": 1, "hidden_size": 4}
    fine = {**size, "n_codes_total": 2, "n_codes_given": 1}
    config = BarkConfig(
        semantic_config=size, coarse_acoustics_config=size, fine_acoustics_config=fine
    )
    BarkModel(config).save_pretrained(folder)
    (folder / "custom_generate").mkdir()
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\ndef generate(): pass\n"
    (folder / "custom_generate/generate.py").write_text(code)


@pytest.fixture
def nested(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A known step that opens a classifier, which opens a model, which brings code."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    save_model_with_code(tmp_path / "model", tmp_path / "marker")
    classifier = tmp_path / "classifier"
    RewardClassifierConfig(model_name=str(tmp_path / "model")).save_pretrained(classifier)
    (classifier / "model.safetensors").touch()
    settings = {"pretrained_path": str(classifier)}
    add_step(policy, {"registry_name": "reward_classifier_processor", "config": settings})
    return policy


def test_a_model_that_a_step_opens_runs_no_code_of_its_own(nested: Path, tmp_path: Path) -> None:
    """Transformers holds the function that fetches code under two names."""
    with pytest.raises(CraftError, match=r"brings its own Python code, .*generate\.py"):
        load_checkpoint(str(nested), device="cpu")
    assert not (tmp_path / "marker").exists()
    # It is no empty threat: allowed, the code runs.
    with pytest.raises(CraftError):
        load_checkpoint(str(nested), device="cpu", trust_remote_code=True)
    assert (tmp_path / "marker").exists()


def test_lora_weights_of_a_nested_model_import_no_module(nested: Path, tmp_path: Path) -> None:
    """Transformers attaches LoRA weights that lie beside a model."""
    shutil.rmtree(tmp_path / "model/custom_generate")
    settings = {"peft_type": "LORA", "r": 1, "target_modules": ["att_proj"]}
    settings |= {"base_model_name_or_path": str(tmp_path / "model")}
    settings |= {"megatron_config": {"a": 1}, "megatron_core": "megatron.planted"}
    (tmp_path / "model/adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CraftError, match="make PEFT import the module megatron"):
        load_checkpoint(str(nested), device="cpu")


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_weights_are_never_unpickled(policy: Path, tmp_path: Path) -> None:
    (policy / "model.safetensors").unlink()
    for name in ("model.safetensors", "pytorch_model.bin", "model.bin", "model.pt"):
        torch.save(Trap(tmp_path / "marker"), policy / name)
    with pytest.raises(CraftError, match=r"model\.safetensors cannot be read"):
        load_checkpoint(str(policy), device="cpu")
    assert not (tmp_path / "marker").exists()


def test_a_file_that_is_no_json_is_named(policy: Path) -> None:
    (policy / "policy_preprocessor.json").write_bytes(b'{"steps": [\xff]}')
    with pytest.raises(CraftError, match=r"policy_preprocessor\.json cannot be read"):
        load_checkpoint(str(policy), device="cpu")
