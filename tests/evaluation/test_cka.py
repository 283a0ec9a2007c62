"""Linear CKA: what it does not see, what it does, and that pieces add up."""

import pytest
import torch
from torch import Tensor

from craftcli.evaluation.cka import LinearCka


def alignment(ours: Tensor, theirs: Tensor, *, pieces: int = 1) -> float:
    cka = LinearCka()
    for a, b in zip(ours.chunk(pieces), theirs.chunk(pieces), strict=True):
        cka.update(a, b)
    return cka.value


@pytest.fixture
def states() -> Tensor:
    return torch.randn(200, 8, generator=torch.Generator().manual_seed(0)) + 3


def test_rotation_scale_and_shift_change_nothing(states: Tensor) -> None:
    turn, _ = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    assert alignment(2.5 * states @ turn - 7, states) == pytest.approx(1, abs=1e-5)


def test_unrelated_states_are_not_aligned(states: Tensor) -> None:
    other = torch.randn(200, 8, generator=torch.Generator().manual_seed(2))
    assert alignment(other, states) < 0.2


def test_pieces_add_up_to_the_definition(states: Tensor) -> None:
    other = states.tanh() + 0.3 * torch.randn(200, 8, generator=torch.Generator().manual_seed(3))
    x, y = (v.double() - v.double().mean(0) for v in (other, states))
    expected = (y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())
    assert alignment(other, states, pieces=7) == pytest.approx(expected.item(), rel=1e-9)


def test_states_that_do_not_vary_align_with_nothing(states: Tensor) -> None:
    assert alignment(torch.ones(200, 8), states) == 0
