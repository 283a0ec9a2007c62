"""Weights are loaded once, and the policy is the one that LeRobot loads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from tiny import FAMILIES
from tiny.act import policy as act_policy
from tiny.family import Family
from tiny.world import save
from torch import Tensor, nn

from craftcli.errors import CraftError
from craftcli.policies.lerobot import loading
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.weight_files import WeightsFile
from craftcli.system.memory import peak_bytes, reset_peak


@pytest.fixture
def unfilled_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave even small parameters unfilled, with NaN in all memory that nobody wrote to."""
    monkeypatch.setattr(loading, "LARGE", 1)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def lerobots(folder: Path) -> Any:
    """The policy as LeRobot itself loads it."""
    config = PreTrainedConfig.from_pretrained(str(folder))
    config.device = "cpu"
    return get_policy_class(config.type).from_pretrained(str(folder), config=config)


def tensors(policy: nn.Module) -> dict[str, Tensor]:
    """All tensors of a policy, with buffers that are not saved, and all names of shared ones."""
    parameters = dict(policy.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(policy.named_buffers(remove_duplicate=False))}


def shared(found: dict[str, Tensor]) -> set[frozenset[str]]:
    """The names that stand for the same memory."""
    by_address: dict[int, set[str]] = {}
    for name, tensor in found.items():
        by_address.setdefault(tensor.data_ptr(), set()).add(name)
    return {frozenset(names) for names in by_address.values()}


@pytest.mark.usefixtures("unfilled_is_nan")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_policy_of_every_family_is_lerobots(family: Family, tmp_path: Path) -> None:
    folder = family.make(tmp_path / "policy")
    ours, theirs = load_checkpoint(str(folder), device="cpu").policy, lerobots(folder)
    mine, other = tensors(ours), tensors(theirs)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.requires_grad == other[name].requires_grad, name
        assert type(tensor) is type(other[name]), name
        assert torch.equal(tensor, other[name]), name
    assert shared(mine) == shared(other)


def test_only_large_parameters_are_left_as_they_were_allocated() -> None:
    with loading.read_once() as unfilled:
        large, small = nn.Linear(1024, 64, bias=False), nn.Linear(8, 8, bias=False)
        nn.init.constant_(small.weight, 3.0)
        buffer = nn.init.constant_(torch.empty(1024, 64), 2.0)
    (left,), (filled,) = large.parameters(), small.parameters()
    assert unfilled.is_left(left)
    assert not unfilled.is_left(filled)
    assert (small.weight == 3).all()
    assert (buffer == 2).all()


def test_after_the_block_parameters_are_filled_as_ever() -> None:
    with loading.read_once():
        pass
    weight = nn.init.constant_(nn.Parameter(torch.empty(1024, 64)), 5.0)
    assert (weight == 5).all()


class Unsaved(nn.Module):
    """A policy that keeps a parameter out of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Linear(1024, 64)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {}


def test_a_parameter_that_no_file_holds_is_refused() -> None:
    with loading.read_once() as unfilled:
        policy = Unsaved()
    with pytest.raises(CraftError, match=r"such as kept\.weight: they would be random"):
        loading.check_filled(policy, unfilled, Path("model.safetensors"))
    with torch.no_grad(), unfilled:
        policy.kept.weight.copy_(torch.zeros(64, 1024))
    loading.check_filled(policy, unfilled, Path("model.safetensors"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ACT policy of 100 MB."""
    return save(tmp_path_factory.mktemp("wide") / "policy", act_policy(cameras=0, width=1024))


def test_loading_takes_the_memory_of_the_weights_once(wide: Path) -> None:
    load_checkpoint(str(wide), device="cpu")  # imports what it needs
    reset_peak()
    before = peak_bytes()
    policy = load_checkpoint(str(wide), device="cpu").policy
    weights = sum(parameter.nbytes for parameter in policy.parameters())
    assert weights > 80e6
    assert peak_bytes() - before < 1.5 * weights


def test_a_tensor_takes_memory_only_while_it_is_in_use(wide: Path) -> None:
    file = WeightsFile(wide / "model.safetensors")
    reset_peak()
    before = peak_bytes()
    assert all(file.tensor(name).isfinite().all() for name in file.names)
    assert peak_bytes() - before < 60e6
