"""How often the host waits for the device in a step: as rarely as the method allows.

No GPU is needed to count that: `tiny.host_reads` counts the calls that would wait for one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny.host_reads import HostReads, counted_reads
from tiny.steps import make_trainer, one_step
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Kind
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.engine.retention.retention import MEASURE_EVERY
from craftcli.engine.trainer import Trainer
from craftcli.engine.transfers import read_together, to_device
from craftcli.policies.lerobot.batches import TaskBatches, read_rows

STEP = 2 * MEASURE_EVERY
"""A step that joins task and anchors, and in which held-out anchors are measured if there are."""


def test_the_counter_sees_every_way_to_read_a_value() -> None:
    values = torch.arange(3.0)
    with counted_reads() as reads:
        values.add(1).sum().square()
    assert not reads
    with counted_reads() as reads:
        ways: list[Any] = [values[1].item(), float(values[1]), int(values[1]), bool(values[1])]
        ways += [values.tolist(), values.cpu(), values.numpy(), values[values > 1]]
        ways += [values.nonzero(), torch.equal(values, values), values.masked_select(values > 1)]
    assert reads.total() == len(ways)


def reads_of_a_step(
    student: Any, data: Any, cache: Path, *, held: bool = True, **settings: Any
) -> HostReads:
    """The reads of one step, of a run that is within its budget or not."""
    small = {"steps": 100, "epsilon_start": 10.0, "mode": "hidden+action"}
    trainer = make_trainer(student, data, cache, **{**small, **settings})
    if trainer.retention:
        state = trainer.retention.state_dict()
        for constraint in state.values():
            constraint["violated"] = not held
        trainer.retention.load_state_dict(state)
        assert trainer.retention.joins(STEP) is held
    batch = student.preprocess(read_rows(data, [0, 1]))
    with counted_reads() as reads:
        report = one_step(trainer, [batch] * trainer.config.grad_accum, step=STEP)
    assert not report.skipped
    return reads


@pytest.mark.parametrize(
    "settings",
    [{}, {"grad_accum": 2}, {"held_out_share": 0.5}, {"amp": "bf16"}, {"mode": "none"}],
    ids=str,
)
def test_a_step_of_one_backward_pass_reads_once(
    student: Any, new_data: Any, cache: Path, settings: dict[str, Any]
) -> None:
    assert reads_of_a_step(student, new_data, cache, **settings)["craft"] == 1


@pytest.mark.parametrize(
    "settings",
    [{}, {"grad_accum": 2}, {"held_out_share": 0.5}, {"surgery": "per_layer"}],
    ids=str,
)
def test_a_step_of_two_backward_passes_reads_twice(
    student: Any, new_data: Any, cache: Path, settings: dict[str, Any]
) -> None:
    assert reads_of_a_step(student, new_data, cache, held=False, **settings)["craft"] == 2


def test_lerobots_own_step_reads_twice_beside_what_its_policy_reads(
    student: Any, new_data: Any, cache: Path
) -> None:
    """pi0_fast reads two values in its forward pass, whoever calls it."""
    craft = reads_of_a_step(student, new_data, cache)
    trainer = make_trainer(student, new_data, cache, mode="none")
    batch = student.preprocess(next(iter(TaskBatches(new_data, batch_size=4, seed=0, workers=0))))
    with counted_reads() as lerobot:
        lerobot_step(trainer, batch)
    assert dict(lerobot) == {"lerobot": 2 + craft["lerobot"]}
    assert craft["lerobot"] == 2


def lerobot_step(trainer: Trainer, batch: Any) -> None:
    from accelerate import Accelerator
    from lerobot.scripts.lerobot_train import update_policy
    from lerobot.utils.logging_utils import AverageMeter, MetricsTracker

    meters = {name: AverageMeter(name) for name in ("loss", "grad_norm", "lr", "update_s")}
    tracker = MetricsTracker(4, 100, 10, meters, initial_step=0)
    update_policy(
        tracker, trainer.student.policy, batch, trainer.optimizer, 1.0, Accelerator(cpu=True)
    )


def test_values_read_together_are_those_read_one_by_one() -> None:
    one, table = torch.tensor(1 / 3), torch.rand(2, 3, dtype=torch.float64)
    none = torch.empty(0)
    assert read_together(one, none, table) == [[one.item()], [], table.flatten().tolist()]


class Copies(TorchDispatchMode):
    """Records copies to a GPU that is not there; FakeTensorMode makes the tensors on it."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[torch.Tensor] = []
        self.seen: list[tuple[bool, bool]] = []
        """Of each copy, whether it starts from pinned memory and whether the host goes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._pin_memory.default:  # needs a driver
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        device = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and device is not None and device.type == "cuda":
            pinned = any(args[0] is known for known in self.pinned)
            self.seen.append((pinned, kwargs.get("non_blocking", False)))
        return func(*args, **kwargs)


@contextmanager
def fake_gpu() -> Iterator[Copies]:
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:
        yield copies


def test_anchors_are_copied_to_a_gpu_without_waiting(cache: Path) -> None:
    anchors = AnchorSet(
        CacheReader.open(cache), batch_size=4, seed=0, kinds=(Kind.HIDDEN, Kind.ACTION)
    )
    with fake_gpu() as copies:
        batch = anchors.read(np.arange(4), torch.device("cuda"))
    groups = (batch.inputs, batch.targets, batch.outputs, batch.variances)
    tensors = [batch.mask, *(tensor for group in groups for tensor in group.values())]
    assert all(tensor is not None and tensor.device.type == "cuda" for tensor in tensors)
    assert copies.seen == [(True, True)] * len(tensors)


def test_a_plain_copy_to_a_gpu_would_wait() -> None:
    with fake_gpu() as copies:
        torch.ones(2).to(torch.device("cuda"))
    assert copies.seen == [(False, False)]


def test_on_a_cpu_nothing_is_copied() -> None:
    values = torch.ones(2)
    assert to_device(values, torch.device("cpu")) is values
