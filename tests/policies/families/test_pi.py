"""pi05 and pi0: precision, gradient checkpointing, and the names of openpi."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import pi0, pi05
from tiny.inputs import SEEDS, processed

from craftcli.engine.retention.terms import evaluation_mode
from craftcli.errors import CraftError
from craftcli.policies.base import FeatureRequest, Features
from craftcli.policies.families.any_policy import GenericAdapter
from craftcli.policies.families.registry import adapter_for
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.weight_files import WEIGHTS_FILE

MAKERS = {"pi05": pi05, "pi0": pi0}
TIME_LAYERS = {"pi05": "time_mlp_", "pi0": "action_time_mlp_"}
OPENPI_TIME_LAYERS = {"pi05": "action_time_mlp_", "pi0": "time_mlp_"}

families = pytest.mark.parametrize("family", list(MAKERS))
stacks = pytest.mark.parametrize("stack", ["vlm", "expert"])


def run(policy: Any, stack: str, *, output: bool = False) -> Features:
    adapter = adapter_for(policy.config.type)
    batch = adapter.anchor_inputs(policy, processed(policy), seeds=SEEDS, own_actions=False)
    return adapter.features(
        policy, batch, FeatureRequest(stack=stack, layers=(0, 2), output=output)
    )


@families
@stacks
def test_bfloat16_gives_the_same_features_to_its_precision(family: str, stack: str) -> None:
    exact = MAKERS[family].policy().eval()
    rounded = MAKERS[family].policy(dtype="bfloat16").eval()
    assert adapter_for(rounded.config.type).compute_dtype(rounded) is torch.bfloat16
    with torch.no_grad():
        one, two = run(exact, stack), run(rounded, stack)
    valid = one.masks.prefix | one.masks.action
    for layer, states in one.hidden.items():
        assert two.hidden[layer].dtype is torch.bfloat16
        error = (two.hidden[layer].float() - states)[valid].norm() / states[valid].norm()
        assert error < 0.03


@families
@stacks
@pytest.mark.parametrize("output", [False, True])
def test_gradient_checkpointing_changes_nothing_but_memory(
    family: str, stack: str, output: bool
) -> None:
    """The same features and gradients, from layers that the backward pass runs again."""
    results, runs = [], []
    for checkpointing in (False, True):
        policy = MAKERS[family].policy(gradient_checkpointing=checkpointing).train()
        layer = policy.model.paligemma_with_expert.gemma_expert.model.layers[0]
        count: list[None] = []
        layer.mlp.register_forward_pre_hook(lambda *_, count=count: count.append(None))
        with evaluation_mode(policy):
            found = run(policy, stack, output=output)
            (found.hidden[2] * 0.5 + found.hidden[0]).square().mean().backward()
        gradients = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
        results.append((found, gradients))
        runs.append(len(count))
    (one, gradients), (two, same) = results
    assert gradients
    for layer, states in one.hidden.items():
        assert torch.equal(states, two.hidden[layer])
    touched = {n for n, gradient in gradients.items() if gradient.any()}
    assert touched == {n for n, gradient in same.items() if gradient.any()}
    for name in touched:
        torch.testing.assert_close(same[name], gradients[name], rtol=1e-5, atol=1e-7)
    # The language model alone runs without the expert.
    assert runs == ([1, 2] if stack == "expert" or output else [0, 0])


@families
def test_a_policy_that_has_sampled_gives_the_same_states(family: str) -> None:
    """LeRobot's sampling switches the kind of attention, for good."""
    fresh, used = MAKERS[family].policy().eval(), MAKERS[family].policy().eval()
    used.predict_action_chunk(processed(used))
    with torch.no_grad():
        one, two = run(fresh, "vlm"), run(used, "vlm")
    for layer, states in one.hidden.items():
        assert torch.equal(states, two.hidden[layer])


@families
def test_a_checkpoint_of_openpi_is_complete_under_its_own_names(
    family: str, tmp_path: Path
) -> None:
    folder = MAKERS[family].make(tmp_path / family)
    weights = load_file(folder / WEIGHTS_FILE)
    embedding = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    renamed = {
        name.removeprefix("model.").replace(TIME_LAYERS[family], OPENPI_TIME_LAYERS[family]): tensor
        for name, tensor in weights.items()
    }
    del renamed[embedding]
    save_file(renamed, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    policy = load_checkpoint(str(folder), device="cpu").policy
    head = "model.paligemma_with_expert.paligemma.lm_head.weight"
    assert torch.equal(policy.state_dict()[f"model.{embedding}"], weights[head])
    lost = next(name for name in renamed if "time_mlp_in.weight" in name)
    del renamed[lost]
    save_file(renamed, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(CraftError, match="did not load completely"):
        load_checkpoint(str(folder), device="cpu")


@families
def test_a_type_derived_from_a_family_is_served_as_that_family(family: str) -> None:
    assert adapter_for(f"craft_tiny_{family}") is adapter_for(family)


def test_an_unknown_type_is_served_by_its_own_forward_pass() -> None:
    assert isinstance(adapter_for("nothing"), GenericAdapter)
