"""Taps read the layers of policies that torch.compile has compiled, as with `compile_model`."""

import multiprocessing
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from craftcli.policies.base import LayerStack
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.taps import tap


class Model(nn.Module):
    """Two layers, and a forward pass that LeRobot's policies would compile."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.ended = 0

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values).relu()
        self.ended += 1
        return values.sum()


def compiled(module: Any) -> None:
    """As LeRobot does it with `compile_model`, but without a compiler that takes minutes."""
    module.forward = torch.compile(module.forward, backend="eager")


def apart(work: Callable[[], None]) -> None:
    """Compile in a process of its own: later tests cannot fork one that has compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none of them is used
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
    child.join()
    assert child.exitcode == 0


def check_model() -> None:
    model, values = Model(), torch.ones(2, 3)
    stack = LayerStack.of_modules(model.layers)
    with tap(stack, (0,), stop=False) as expected:
        model(values)
    compiled(model)
    model(values)  # compiled without a tap
    ended = model.ended
    with tap(stack, (0,)) as found:
        model(values)
    assert torch.equal(found[0], expected[0])
    assert model.ended == ended  # it stopped
    # As `gradient_reach` does: what lies behind a layer has a gradient when it is cut there.
    with tap(stack, (0,), stop=False) as found:
        loss = model(values)
    found[0].register_hook(torch.zeros_like)
    loss.backward()
    first, second = (next(layer.parameters()).grad for layer in model.layers)
    assert first is None or not first.any()
    assert second is not None
    assert second.any()


def test_a_layer_of_a_compiled_forward_pass_is_read_and_cut() -> None:
    apart(check_model)


def test_the_hidden_states_of_a_compiled_policy_are_those_of_the_plain_one(
    student: Any, new_data: Any
) -> None:
    batch = student.preprocess(read_rows(new_data, [0, 1]))
    stack = student.adapter.stack(student.policy, "vlm")
    student.policy.eval()

    def read() -> dict[int, Tensor]:
        with torch.no_grad(), tap(stack, (1, 2), stop=False) as found:
            student.policy(dict(batch))
        return found

    def check() -> None:
        expected = read()
        compiled(student.policy.model)
        student.policy(dict(batch))
        found = read()
        assert found.keys() == expected.keys()
        for layer, states in found.items():
            assert torch.equal(states, expected[layer])

    apart(check)
