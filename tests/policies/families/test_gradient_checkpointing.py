"""Gradient checkpointing: the same gradients, or a clear refusal, for every family."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny.act import ACT
from tiny.diffusion import DIFFUSION
from tiny.family import Family
from tiny.molmoact2 import MOLMOACT2
from tiny.multi_task_dit import FLOWED
from tiny.pi0 import PI0
from tiny.pi0_fast import PI0_FAST
from tiny.pi05 import PI05
from tiny.smolvla import SMOLVLA
from tiny.vqbet import VQBET
from tiny.world import write_dataset
from tiny.xvla import XVLA

from craftcli.choices import Layout
from craftcli.engine.retention.terms import evaluation_mode
from craftcli.errors import CraftError
from craftcli.policies.base import FeatureRequest
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset

FAMILIES = (PI05, PI0, PI0_FAST, DIFFUSION, MOLMOACT2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")


def open_family(family: Family, data: Path, folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """A policy, and two rows as it takes them."""
    opened = load_checkpoint(str(family.make(folder / "policy")), device="cpu")
    dataset = open_dataset(str(data), root=None, policy_config=opened.policy.config)
    return opened, opened.preprocess(read_rows(dataset, [0, 5]))


def gradients(policy: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and its gradients; what is drawn is always the same."""
    torch.manual_seed(0)
    policy.train()
    loss, _ = policy(dict(batch))
    loss.backward()
    return loss.item(), {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


def held_for_backward(run: Callable[[], object]) -> int:
    """How many bytes a forward pass keeps for its backward pass."""
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        run()
    return kept


def assert_same_gradients(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_it_saves_memory_and_changes_nothing(family: Family, data: Path, tmp_path: Path) -> None:
    opened, batch = open_family(family, data, tmp_path)
    saving = copy.deepcopy(opened.policy)
    opened.adapter.enable_gradient_checkpointing(saving)
    both = (opened.policy.train(), saving.train())
    whole, less = (held_for_backward(partial(p, dict(batch))) for p in both)
    assert less < whole
    (plain, expected), (recomputed, found) = (gradients(policy, batch) for policy in both)
    assert recomputed == pytest.approx(plain)
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("ends", ["at the first layer", "at the last layer", "with the output"])
@pytest.mark.parametrize(
    ("family", "stack"),
    [
        pytest.param(family, stack, id=f"{family.name}-{stack}")
        for family in FAMILIES
        for stack in family.reached
        if stack != "conditioning"  # of diffusion: what comes before it is never recomputed
    ],
)
def test_anchors_are_recomputed_too(
    family: Family, stack: str, ends: str, data: Path, tmp_path: Path
) -> None:
    """They run in evaluation mode, where a policy's own switch would be off."""
    opened, batch = open_family(family, data, tmp_path)
    layers = tuple(range(len(opened.adapter.stack(opened.policy, stack))))
    request = FeatureRequest(
        stack=stack,
        layers=layers[:1] if ends == "at the first layer" else layers,
        with_actions=True,
        output=ends == "with the output",
    )
    whole, less = assert_recomputed(opened, batch, request)
    # A pass that recomputes is not stopped early, and keeps what lies between its layers.
    assert less < whole or ends == "at the first layer"


@pytest.mark.parametrize(
    ("family", "path", "layout"),
    [
        (PI0_FAST, "model.paligemma_with_expert.paligemma.model.language_model.layers", Layout.BSD),
        (DIFFUSION, "diffusion.unet.mid_modules", Layout.BDS),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_layers_named_by_their_path_are_recomputed_too(
    family: Family, path: str, layout: Layout, data: Path, tmp_path: Path
) -> None:
    opened, batch = open_family(family, data, tmp_path)
    request = FeatureRequest(stack=path, layers=(0,), with_actions=True, layout=layout)
    assert_recomputed(opened.for_stack(path), batch, request)


def assert_recomputed(
    opened: Checkpoint, batch: dict[str, Any], request: FeatureRequest
) -> tuple[int, int]:
    """The same features and gradients; how much is kept without and with recomputation."""
    adapter, saving = opened.adapter, copy.deepcopy(opened.policy)
    adapter.enable_gradient_checkpointing(saving)
    anchors = adapter.anchor_inputs(saving.eval(), dict(batch), seeds=[1, 2], own_actions=False)
    held, seen = [], []
    for policy in (opened.policy, saving):
        policy.train().zero_grad()
        with evaluation_mode(policy):
            held.append(held_for_backward(partial(adapter.features, policy, anchors, request)))
            features = adapter.features(policy, dict(anchors), request)
            squares = [states.square().mean() for states in features.hidden.values()]
            torch.stack(squares).sum().backward()
        named = policy.named_parameters()
        seen.append((features, {n: p.grad for n, p in named if p.grad is not None}))
    (one, expected), (two, found) = seen
    for layer, states in one.hidden.items():
        assert torch.equal(two.hidden[layer], states)
    assert (one.output is None) == (two.output is None) == (not request.output)
    if one.output is not None and two.output is not None:
        assert torch.equal(two.output.values, one.output.values)
    touched = {name: gradient for name, gradient in expected.items() if gradient.any()}
    assert touched
    # What lies behind the layers gets zeros where it is run, and nothing where it is not.
    assert_same_gradients({n: g for n, g in found.items() if g.any()}, touched)
    return held[0], held[1]


@pytest.mark.parametrize(
    "family", [ACT, VQBET, FLOWED, SMOLVLA, XVLA], ids=lambda family: family.name
)
def test_a_family_without_it_says_so(family: Family, tmp_path: Path) -> None:
    opened = load_checkpoint(str(family.make(tmp_path / "policy")), device="cpu")
    with pytest.raises(CraftError, match=r"no gradient checkpointing.*--amp bf16"):
        opened.adapter.enable_gradient_checkpointing(opened.policy)
