"""Gradient checkpointing: the same gradients, or a clear refusal, for every family."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny.act import ACT
from tiny.diffusion import DIFFUSION
from tiny.family import Family
from tiny.multi_task_dit import FLOWED
from tiny.pi0 import PI0
from tiny.pi05 import PI05
from tiny.smolvla import SMOLVLA
from tiny.vqbet import VQBET
from tiny.world import write_dataset
from tiny.xvla import XVLA

from craftcli.errors import CraftError
from craftcli.policies.base import Wanted
from craftcli.policies.data import open_dataset, read_rows
from craftcli.policies.loading import load_checkpoint
from craftcli.policies.memory import save_memory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")


def gradients(policy: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and its gradients; what is drawn is always the same."""
    torch.manual_seed(0)
    policy.train()
    loss, _ = policy(dict(batch))
    loss.backward()
    return loss.item(), {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


def held_for_backward(policy: Any, batch: Any) -> int:
    """How many bytes a forward pass keeps for its backward pass."""
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    policy.train()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        policy(dict(batch))
    return kept


@pytest.mark.parametrize("family", [PI05, PI0, DIFFUSION], ids=lambda family: family.name)
def test_it_saves_memory_and_changes_nothing(family: Family, data: Path, tmp_path: Path) -> None:
    opened = load_checkpoint(str(family.make(tmp_path / "policy")), device="cpu")
    dataset = open_dataset(str(data), root=None, policy_config=opened.policy.config)
    batch = opened.preprocess(read_rows(dataset, [0, 5]))
    saving = copy.deepcopy(opened.policy)
    save_memory(saving)
    assert held_for_backward(saving, batch) < held_for_backward(opened.policy, batch)
    plain, expected = gradients(opened.policy, batch)
    recomputed, found = gradients(saving, batch)
    assert recomputed == pytest.approx(plain)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    anchors = opened.adapter.anchor_inputs(
        opened.policy.eval(), dict(batch), seeds=[1, 2], own_actions=False
    )
    wanted = Wanted(stack=opened.adapter.default_stack, layers=(0,), with_actions=True)
    one = opened.adapter.features(opened.policy, dict(anchors), wanted).hidden[0]
    assert torch.equal(opened.adapter.features(saving.eval(), dict(anchors), wanted).hidden[0], one)


@pytest.mark.parametrize(
    "family", [ACT, VQBET, FLOWED, SMOLVLA, XVLA], ids=lambda family: family.name
)
def test_a_family_without_it_says_so(family: Family, tmp_path: Path) -> None:
    opened = load_checkpoint(str(family.make(tmp_path / "policy")), device="cpu")
    with pytest.raises(CraftError, match=r"no gradient checkpointing.*--amp bf16"):
        save_memory(opened.policy)
