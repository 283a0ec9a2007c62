"""Where the whole method ends on a problem whose constrained optimum is known.

Minimise |x - a|² subject to |x - b|² <= ε. With D = |a - b| > √ε the optimum is the point of the
ball around b that is nearest to a, and λ* = D / √ε - 1.
"""

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor

from craftcli.choices import Merge
from craftcli.engine.multiplier import Multiplier
from craftcli.engine.surgery import operate_

CONTROLLERS = {
    "ascent": {},
    "nupi": {"kp": 5.0},
    "nupi, averaged": {"kp": 5.0, "nu": 0.9},
}
every_controller = pytest.mark.parametrize(
    "gains", list(CONTROLLERS.values()), ids=list(CONTROLLERS)
)


@dataclass
class End:
    """Where a run ended, in units of the problem."""

    distance: float
    """To the optimum, as a share of D."""
    multiplier: float
    """λ as a share of λ*."""
    used: float
    """L_ret as a share of ε."""


def descend(
    gains: dict[str, float],
    *,
    project: Literal["never", "always", "violated"],
    groups: list[int] | None = None,
    lr: float = 0.02,
    steps: int = 1000,
) -> End:
    generator = torch.Generator().manual_seed(0)
    a, b, noise = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    apart = (a - b).norm().item()
    radius = apart / 3
    best, best_lam = b + radius * (a - b) / apart, apart / radius - 1
    x, multiplier = b + 0.1 * noise, Multiplier(value=0.0, lr=0.05, maximum=50.0, **gains)
    loss = 0.0
    for _ in range(steps):
        loss = (x - b).square().sum().item()
        violated = loss > radius**2
        merged, _ = operate_(
            _split(2 * (x - a)),
            _split(2 * (x - b)),
            threshold=-0.1,
            project=project == "always" or (project == "violated" and violated),
            merge=Merge.WEIGHTED,
            lam=multiplier.value,
            groups=groups,
        )
        x = x - lr * torch.cat([g for g in merged if g is not None])
        multiplier.step(loss - radius**2)
    return End(
        distance=(x - best).norm().item() / apart,
        multiplier=multiplier.value / best_lam,
        used=loss / radius**2,
    )


def _split(gradient: Tensor) -> list[Tensor | None]:
    return [gradient[:2].clone(), gradient[2:].clone()]


@every_controller
def test_without_projection_both_variables_reach_the_optimum(gains: dict[str, float]) -> None:
    end = descend(gains, project="never")
    assert end.distance == pytest.approx(0.0, abs=1e-9)
    assert end.multiplier == pytest.approx(1.0, abs=1e-9)
    assert end.used == pytest.approx(1.0, abs=1e-9)


@every_controller
@pytest.mark.parametrize("groups", [None, [0, 1]], ids=["global", "by group"])
def test_projection_while_the_budget_is_overdrawn_ends_within_a_step_of_the_optimum(
    gains: dict[str, float], groups: list[int] | None
) -> None:
    coarse = descend(gains, project="violated", groups=groups, lr=0.02)
    fine = descend(gains, project="violated", groups=groups, lr=0.005, steps=2000)
    assert coarse.distance < 0.01
    assert fine.distance < coarse.distance / 2


@every_controller
def test_projection_at_every_conflict_keeps_the_budget_and_leaves_it_unused(
    gains: dict[str, float],
) -> None:
    """At a constrained optimum the two gradients oppose each other, so that nothing of the task's
    is left: the run stops wherever they first do, inside the budget."""
    end = descend(gains, project="always")
    assert end.used < 0.2
    assert end.multiplier == 0.0
