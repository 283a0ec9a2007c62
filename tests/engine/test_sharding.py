"""FSDP2 by units: little is gathered at a time, and the gradients are those of one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny.act import STATE_ONLY
from tiny.family import Family
from tiny.pi05 import PI05
from tiny.processes import together
from tiny.smolvla import SMOLVLA
from torch import Tensor, nn

from craftcli.choices import Parallel
from craftcli.distributed import Processes
from craftcli.engine.execution import Execution, Work
from craftcli.engine.retention.terms import evaluation_mode
from craftcli.engine.sharding import describe_units, separable
from craftcli.policies.base import FeatureRequest
from craftcli.policies.families.act import ActAdapter
from craftcli.policies.families.any_policy import GenericAdapter
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset
from craftcli.policies.pooling import needs_action_tokens

ROWS = ([0, 2], [5, 9])
"""Rows of the data by process."""


def works_of(student: Checkpoint, dataset: Any) -> list[list[Work]]:
    """By process: the task's loss, a loss on anchors that ends the pass early, and their sum."""
    policy, adapter = student.policy, student.adapter
    stack = adapter.default_stack
    # Not the last layer: the pass must end while units are still to come.
    layer = max(len(adapter.stack(policy, stack)) - 2, 0)
    with_actions = needs_action_tokens(adapter.pooling_of(stack))
    request = FeatureRequest(stack=stack, layers=(layer,), with_actions=with_actions)

    def of_process(rank: int) -> list[Work]:
        batch = student.preprocess(read_rows(dataset, ROWS[rank]))
        with torch.no_grad():
            inputs = adapter.anchor_inputs(policy, dict(batch), seeds=[1, 2], own_actions=False)

        def task() -> Tensor:
            torch.manual_seed(rank)
            loss: Tensor = policy(dict(batch))[0]
            return loss

        def anchors() -> Tensor:
            with evaluation_mode(policy):
                features = adapter.features(policy, dict(inputs), request)
            return features.hidden[layer].float().square().mean()

        return [task, anchors, lambda: task() + 0.5 * anchors()]

    return [of_process(rank) for rank in (0, 1)]


def gradients_of(policy: nn.Module) -> dict[str, Tensor | None]:
    found = {name: p.grad for name, p in policy.named_parameters()}
    policy.zero_grad()
    return found


def sizes_of_units(root: nn.Module) -> dict[nn.Module, int]:
    """How many numbers FSDP2 gathers with each module."""
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    sizes: dict[nn.Module, int] = {}
    for unit in units:
        inner = (part for part in unit.modules() if part is not unit and part in units)
        others = {id(p) for part in inner for p in part.parameters()}
        sizes[unit] = sum(p.numel() for p in unit.parameters() if id(p) not in others)
    return sizes


def is_gathered(parameter: Tensor) -> bool:
    return not hasattr(parameter, "to_local")


def gathered(policy: nn.Module) -> int:
    return sum(p.numel() for p in policy.parameters() if is_gathered(p))


def watch_peak(policy: nn.Module, units: Iterator[nn.Module], seen: list[int]) -> None:
    """Record what is gathered while each unit is called, also if it is called again backward."""
    for unit in units:
        unit.register_forward_pre_hook(lambda *_: seen.append(gathered(policy)))


@pytest.mark.parametrize(
    ("family", "recompute"),
    [(PI05, False), (PI05, True), (SMOLVLA, False), (STATE_ONLY, False)],
    ids=lambda value: value.name if isinstance(value, Family) else f"recompute={value}",
)
def test_two_processes_gather_units_and_compute_the_gradient_of_one(
    family: Family, recompute: bool, tmp_path: Path
) -> None:
    """Joint attention (pi05, smolvla) calls no layer as a module; its units are gathered too."""
    student = load_checkpoint(str(family.make(tmp_path / "policy")), device="cpu")
    family.write_data(tmp_path / "data")
    policy = student.policy
    dataset = open_dataset("tiny/data", root=str(tmp_path / "data"), policy_config=policy.config)
    if recompute:
        student.adapter.enable_gradient_checkpointing(policy)
    policy.train()
    works = works_of(student, dataset)
    expected = []
    for pair in zip(*works, strict=True):
        Execution(policy).accumulate(pair)
        expected.append(gradients_of(policy))
    whole = sum(p.numel() for p in policy.parameters())

    def check() -> None:
        processes = Processes.from_environment()
        with processes.connected():
            units = student.adapter.shard_units(policy)
            execution = Execution(policy, processes=processes, parallel=Parallel.FSDP, units=units)
            sizes = sizes_of_units(execution.student)
            root = sizes.pop(execution.student)
            largest = max(sizes.values())
            assert largest < 0.25 * whole
            assert sum(sizes.values()) + root == whole
            peak: list[int] = []
            watch_peak(policy, iter(sizes), peak)
            for work, right in zip(works[processes.rank], expected, strict=True):
                execution.accumulate([work])
                assert_equal(gradients_of(policy), right)
                assert gathered(policy) == 0
            if recompute:  # the layers of several units are then gathered together
                return
            assert root < max(peak) <= root + 2 * largest
            assert max(peak) < 0.5 * whole
            with torch.no_grad():
                execution.student(works[processes.rank][0])
            assert not [p for unit in sizes for p in unit.parameters() if is_gathered(p)]

    together(check)


def assert_equal(found: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> None:
    assert found.keys() == right.keys()
    for name, gradient in found.items():
        other = right[name]
        if gradient is None or other is None:
            assert all(g is None or not g.any() for g in (gradient, other)), name
            continue
        whole: Callable[[], Tensor] = gradient.full_tensor  # type: ignore[attr-defined]
        torch.testing.assert_close(whole(), other, rtol=1e-4, atol=1e-6, msg=name)


def test_inner_units_come_first_and_shared_weights_are_in_none() -> None:
    root = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    root["d"] = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    root["a"].weight = root["b"].weight
    wanted = [root["d"], root["d"][0], root["a"], root["b"], root["c"]]  # type: ignore[index]
    found = list(separable(root, wanted))
    assert found == [root["d"][0], root["d"], root["c"]]  # type: ignore[index]


def test_a_policy_whose_units_are_unknown_is_sharded_as_one_and_says_so() -> None:
    policy = nn.Linear(2, 2)
    note = describe_units(GenericAdapter().shard_units(policy), "custom")
    assert note is not None
    assert "custom" in note
    assert "one unit" in note
    assert describe_units([policy], "custom") is None


def test_layers_that_are_read_at_their_output_are_units(tmp_path: Path) -> None:
    policy = load_checkpoint(str(STATE_ONLY.make(tmp_path / "policy")), device="cpu").policy
    layers = [*policy.model.encoder.layers, *policy.model.decoder.layers]
    assert ActAdapter().shard_units(policy) == layers
