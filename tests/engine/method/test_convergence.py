"""Where the whole method ends on a problem with a known constrained optimum.

Minimise |x - a|² subject to |x - b|² <= ε. With D = |a - b| > √ε the optimum is the point of the
ball around b that is nearest to a, and λ* = D / √ε - 1.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from craftcli.choices import Merge
from craftcli.engine.method.multiplier import Multiplier, Rule
from craftcli.engine.method.projection import project_and_merge_

CONTROLLERS: dict[str, dict[str, Any]] = {
    "ascent": {},
    "nupi": {"kp": 5.0},
    "nupi, averaged": {"kp": 5.0, "nu": 0.9},
}
RULES = {Rule.RELATIVE: 1e-3, Rule.ABSOLUTE: 1e-9}
every_rule = pytest.mark.parametrize(("rule", "near"), list(RULES.items()), ids=list(RULES))
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
    gains: dict[str, Any],
    *,
    project: Literal["never", "always", "violated"],
    groups: list[int] | None = None,
    lr: float = 0.02,
    steps: int = 1000,
    rule: Rule = Rule.RELATIVE,
) -> End:
    generator = torch.Generator().manual_seed(0)
    a, b, noise = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    apart = (a - b).norm().item()
    radius = apart / 3
    best, best_lam = b + radius * (a - b) / apart, apart / radius - 1
    x = b + 0.1 * noise
    multiplier = Multiplier(value=0.0, lr=0.05, maximum=50.0, rule=rule, **gains)
    loss = 0.0
    for _ in range(steps):
        loss = (x - b).square().sum().item()
        violated = loss > radius**2
        merged, _ = project_and_merge_(
            _split(2 * (x - a)),
            _split(2 * (x - b)),
            threshold=-0.1,
            project=project == "always" or (project == "violated" and violated),
            merge=Merge.WEIGHTED,
            lam=multiplier.value,
            groups=groups,
        )
        x = x - lr * torch.cat([g for g in merged if g is not None])
        multiplier.step(loss, radius**2)
    return End(
        distance=(x - best).norm().item() / apart,
        multiplier=multiplier.value / best_lam,
        used=loss / radius**2,
    )


def _split(gradient: Tensor) -> list[Tensor | None]:
    return [gradient[:2].clone(), gradient[2:].clone()]


@every_rule
@every_controller
def test_without_projection_both_variables_reach_the_optimum(
    gains: dict[str, Any], rule: Rule, near: float
) -> None:
    end = descend(gains, project="never", rule=rule, steps=2000)
    assert end.distance == pytest.approx(0.0, abs=near)
    assert end.multiplier == pytest.approx(1.0, abs=near)
    assert end.used == pytest.approx(1.0, abs=near)


@every_controller
@pytest.mark.parametrize("groups", [None, [0, 1]], ids=["global", "by group"])
def test_projection_while_the_budget_is_overdrawn_ends_within_a_step_of_the_optimum(
    gains: dict[str, Any], groups: list[int] | None
) -> None:
    coarse = descend(gains, project="violated", groups=groups, lr=0.02)
    fine = descend(gains, project="violated", groups=groups, lr=0.005, steps=2000)
    assert coarse.distance < 0.02
    assert fine.distance < coarse.distance / 2


@every_controller
def test_projection_at_every_conflict_keeps_the_budget_and_leaves_it_unused(
    gains: dict[str, Any],
) -> None:
    """At a constrained optimum the two gradients oppose each other, so that nothing of the task's
    is left: the run stops wherever they first do, inside the budget."""
    end = descend(gains, project="always")
    assert end.used < 0.2
    assert end.multiplier == pytest.approx(0.0, abs=1e-3)


@dataclass
class Line:
    """Minimise (x - a)² subject to x² <= ε by the default multiplier; λ* = a / √ε - 1."""

    used: list[float]
    """L_ret / ε after each step."""
    lam: list[float]


def follow(
    best_lam: float, *, scale: float = 1.0, every: int = 1, steps: int = 400, lam: float = 1.0
) -> Line:
    epsilon = 0.02 * scale
    a = (best_lam + 1) * math.sqrt(epsilon)
    x, multiplier = 0.0, Multiplier(value=lam, every=every)
    used, lams = [], []
    for step in range(steps):
        gradient = 2 * (x - a)
        if step % every == 0:
            gradient += multiplier.value * 2 * x
            multiplier.step(x * x, epsilon)
        x -= 0.02 * gradient
        used.append(x * x / epsilon)
        lams.append(multiplier.value)
    return Line(used=used, lam=lams)


@pytest.mark.parametrize("best_lam", [2.0, 5.0, 8.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_budget_is_reached_in_tens_of_steps_whatever_its_size(
    best_lam: float, scale: float
) -> None:
    """With a step of 0.1 · (L_ret - ε), ε = 0.02 and λ* = 5, L_ret is 1.3 x ε after 1500 steps."""
    line = follow(best_lam, scale=scale)
    assert max(line.used) > 1.2
    assert max(line.used[150:]) < 1.6
    assert max(line.used[300:]) < 1.2
    assert line.lam[-1] == pytest.approx(best_lam, rel=0.1)


def test_with_few_retention_steps_the_budget_is_reached_as_soon() -> None:
    held = follow(1.0, every=5).used
    assert max(held) > 2
    # Between two retention steps L_ret rises again.
    assert min(held[300:]) < 1


def test_λ_comes_down_again_once_the_budget_is_kept() -> None:
    """The task pulls hard at first and then less, as when it has been learned."""
    multiplier = Multiplier()
    for _ in range(60):
        multiplier.step(0.2, 0.02)
    assert multiplier.value == 10.0
    lams = [multiplier.step(0.002, 0.02) for _ in range(100)]
    assert lams[20] < 3
    assert lams[-1] < 0.6


def test_λ_of_a_budget_that_is_always_kept_falls_slowly() -> None:
    """Behaviour needs some of that weight: a budget may be kept on the anchors alone."""
    multiplier = Multiplier()
    assert multiplier.step(0.0, 0.02) == pytest.approx(1 / 1.02)
    for _ in range(99):
        multiplier.step(0.0, 0.02)
    assert multiplier.value == pytest.approx(1 / 3)
