"""LoRA weights start without effect, are all that is trained, and load from a checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import make_policy
from safetensors.torch import load_file, save_file
from tiny.act import ACT
from tiny.smolvla import SMOLVLA

from craftcli.config.parsing import LoraSpec
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import FeatureRequest
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.identity import teacher_identity
from craftcli.policies.lerobot.lora import add_lora, fold_lora, weight_dtypes
from craftcli.policies.lerobot.lora_files import LORA_CONFIG, LORA_WEIGHTS

SPEC = LoraSpec(r=4, alpha=8, targets=("q_proj", "v_proj"))
WANTED = FeatureRequest(stack="vlm", layers=(3,), with_actions=True, output=True)


def stirred(student: Checkpoint, seed: int = 0) -> Checkpoint:
    """As if the LoRA weights had been trained: their second matrices are no longer 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in student.policy.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return student


def save(student: Checkpoint, folder: Path) -> Path:
    """A checkpoint with LoRA weights, as LeRobot writes it."""
    student.trained.save_pretrained(folder)
    student.policy.config.save_pretrained(folder)
    student.preprocess.save_pretrained(folder)
    student.postprocess.save_pretrained(folder)
    return folder


def logits(opened: Checkpoint, data: Any) -> Any:
    opened.policy.eval()
    batch = opened.preprocess(read_rows(data, [0, 3]))
    with torch.no_grad():
        output = opened.adapter.features(opened.policy, batch, WANTED).output
    assert output is not None
    return output.values


@pytest.fixture
def saved(student: Any, tmp_path: Path) -> Path:
    return save(stirred(add_lora(student, SPEC, seed=1)), tmp_path / "adapters")


def test_new_adapters_change_nothing_and_are_all_that_is_trained(
    student: Any, teacher: Any, new_data: Any
) -> None:
    adapted = add_lora(student, SPEC, seed=1)
    trained = [name for name, p in adapted.policy.named_parameters() if p.requires_grad]
    # Two matrices for two projections, in 4 layers of language and 2 of vision.
    assert len(trained) == 2 * 2 * 6
    assert all("lora_" in name for name in trained)
    assert torch.equal(logits(adapted, new_data), logits(teacher, new_data))
    assert teacher_identity(adapted) == teacher_identity(teacher)


def test_the_seed_alone_decides_how_adapters_start() -> None:
    def start(seed: int, noise: int) -> dict[str, Any]:
        torch.manual_seed(noise)
        opened = load_checkpoint(str(TEACHER_FOLDER), device="cpu")
        state = add_lora(opened, SPEC, seed=seed).policy.state_dict()
        return {name: t for name, t in state.items() if "lora_A" in name}

    one, same, other = start(1, 0), start(1, 5), start(2, 0)
    assert one
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_a_star_stands_for_any_part_of_a_name(student: Any) -> None:
    spec = LoraSpec(r=2, alpha=4, targets=("language_model.*.q_proj",))
    adapted = add_lora(student, spec, seed=0)
    trained = [name for name, p in adapted.policy.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 4
    assert all("language_model" in name for name in trained)


@pytest.mark.parametrize("target", ["nothing_like_it", "proj", "layers.0", "embed_tokens", "*norm"])
def test_targets_that_match_nothing_list_what_there_is(student: Any, target: str) -> None:
    spec = LoraSpec(r=2, alpha=4, targets=("q_proj", target))
    with pytest.raises(CraftError, match=r"such as lm_head, .*k_proj, v_proj, q_proj") as caught:
        add_lora(student, spec, seed=0)
    assert repr(target) in caught.value.why
    assert caught.value.exit_code == EXIT_USAGE


def test_a_family_without_targets_of_its_own_asks_for_some(student: Any) -> None:
    with pytest.raises(CraftError, match=r"default target_modules.*targets=\.\.\., such as"):
        add_lora(student, LoraSpec(r=2, alpha=4), seed=0)


def test_a_family_with_targets_of_its_own_needs_none(tmp_path: Path) -> None:
    opened = load_checkpoint(str(SMOLVLA.make(tmp_path / "policy")), device="cpu")
    adapted = add_lora(opened, LoraSpec(r=2, alpha=4), seed=0)
    trained = [name for name, p in adapted.policy.named_parameters() if p.requires_grad]
    assert any("lm_expert" in name for name in trained)
    assert any("action_out_proj" in name for name in trained)


def test_what_attention_never_calls_gets_no_adapter(tmp_path: Path) -> None:
    """torch's own attention only reads the weight of its out_proj: LoRA would have no effect."""
    opened = load_checkpoint(str(ACT.make(tmp_path / "policy")), device="cpu")
    with pytest.raises(CraftError, match="out_proj"):
        add_lora(opened, LoraSpec(r=2, alpha=4, targets=("out_proj",)), seed=0)
    adapted = add_lora(opened, LoraSpec(r=2, alpha=4, targets=("linear1",)), seed=0)
    assert adapted.peft is not None


def test_a_checkpoint_of_adapters_opens_as_it_was_saved(saved: Path, new_data: Any) -> None:
    opened = load_checkpoint(str(saved), device="cpu")
    again = stirred(add_lora(load_checkpoint(str(TEACHER_FOLDER), device="cpu"), SPEC, seed=1))
    for name, tensor in again.policy.state_dict().items():
        assert torch.equal(opened.policy.state_dict()[name], tensor)
    trainable = [
        [n for n, p in c.policy.named_parameters() if p.requires_grad] for c in (opened, again)
    ]
    assert trainable[0] == trainable[1]
    assert torch.equal(logits(opened, new_data), logits(again, new_data))


def test_lerobot_opens_it_too(saved: Path, new_data: Any) -> None:
    config = PreTrainedConfig.from_pretrained(str(saved))
    config.pretrained_path, config.device = str(saved), "cpu"
    theirs = make_policy(config, ds_meta=new_data.meta)
    ours = load_checkpoint(str(saved), device="cpu")
    for name, tensor in ours.peft.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor)


def test_an_adapted_policy_is_another_teacher(saved: Path, teacher: Any) -> None:
    adapted = teacher_identity(load_checkpoint(str(saved), device="cpu"))
    base = teacher_identity(teacher)
    assert adapted.weights_digest != base.weights_digest
    assert adapted.config_digest == base.config_digest
    assert adapted.processor_digest == base.processor_digest


@pytest.mark.parametrize("damage", ["missing", "shape", "truncated", "absent"])
def test_adapters_that_do_not_load_are_found(saved: Path, damage: str) -> None:
    file = saved / LORA_WEIGHTS
    weights = load_file(file)
    name = next(iter(weights))
    if damage == "missing":
        save_file({n: t for n, t in weights.items() if n != name}, file)
    elif damage == "shape":
        save_file({**weights, name: torch.zeros(3, 3)}, file)
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        file.unlink()
    with pytest.raises(CraftError, match=r"weights|cannot be opened"):
        load_checkpoint(str(saved), device="cpu")


def test_an_incomplete_policy_under_adapters_is_found(saved: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(TEACHER_FOLDER, tmp_path / "base"))
    weights = load_file(base / "model.safetensors")
    weights.pop(next(iter(weights)))
    save_file(weights, base / "model.safetensors")
    name_base(saved, str(base))
    with pytest.raises(CraftError, match=r"base/model\.safetensors did not load completely"):
        load_checkpoint(str(saved), device="cpu")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("/nowhere/at/all", r"under the LoRA weights.*/nowhere/at/all.*base_model_name_or_path"),
        ("", "does not name the policy that they belong to"),
    ],
)
def test_lora_weights_without_their_policy_are_refused(
    saved: Path, base: str, message: str
) -> None:
    name_base(saved, base)
    with pytest.raises(CraftError, match=message):
        load_checkpoint(str(saved), device="cpu")


def test_an_unreadable_description_of_adapters_is_refused(saved: Path) -> None:
    (saved / LORA_CONFIG).write_text("{")
    with pytest.raises(CraftError, match=r"adapter_config\.json cannot be read"):
        load_checkpoint(str(saved), device="cpu")


def test_adapters_on_adapters_are_refused(saved: Path) -> None:
    with pytest.raises(CraftError, match=r"has LoRA weights already.*craft merge"):
        add_lora(load_checkpoint(str(saved), device="cpu"), SPEC, seed=0)


def test_merged_adapters_compute_the_same(saved: Path, new_data: Any, teacher: Any) -> None:
    opened = load_checkpoint(str(saved), device="cpu")
    before = logits(opened, new_data)
    merged = fold_lora(opened)
    assert list(merged.policy.state_dict()) == list(teacher.policy.state_dict())
    assert torch.allclose(logits(merged, new_data), before, atol=1e-4)
    assert not torch.allclose(before, logits(teacher, new_data), atol=1e-2)


def test_adapters_of_a_low_precision_policy_are_merged_in_float32(tmp_path: Path) -> None:
    base = Path(shutil.copytree(TEACHER_FOLDER, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    adapted = stirred(add_lora(load_checkpoint(str(base), device="cpu"), SPEC, seed=0))
    name = "model.paligemma_with_expert.paligemma.model.language_model.layers.0.self_attn.q_proj"
    layer = adapted.policy.get_submodule(name)
    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert (layer.weight.dtype, first.dtype) == (torch.bfloat16, torch.float32)
    whole = layer.weight.float() + SPEC.alpha / SPEC.r * second @ first
    dtypes = weight_dtypes(adapted.policy)
    merged = fold_lora(adapted).policy.state_dict()
    assert dtypes.keys() >= merged.keys()
    assert dtypes[f"{name}.weight"] == torch.bfloat16
    assert torch.allclose(merged[f"{name}.weight"], whole, atol=1e-7)


def name_base(folder: Path, base: str) -> None:
    file = folder / LORA_CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base}))
