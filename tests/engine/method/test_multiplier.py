import json
import math
from typing import Any

import pytest
import torch
from cooper import ConstraintType
from cooper.multipliers import DenseMultiplier
from cooper.optim import nuPI
from hypothesis import given, settings
from hypothesis import strategies as st

from craftcli.engine.method.multiplier import (
    LARGEST_VIOLATION,
    Multiplier,
    Rule,
    relative_violation,
)

properties = settings(deadline=None, derandomize=True, max_examples=50)
violations = st.lists(st.floats(-100, 100), min_size=1, max_size=50)
gains = st.fixed_dictionaries(
    {"kp": st.floats(0.01, 10), "ki": st.floats(0, 2), "nu": st.floats(-0.9, 0.99)}
)


def make_cooper(value: float) -> DenseMultiplier:
    theirs = DenseMultiplier(init=torch.tensor([value], dtype=torch.float64), dtype=torch.float64)
    theirs.set_constraint_type(ConstraintType.INEQUALITY)
    return theirs


def step_cooper(theirs: DenseMultiplier, optimizer: Any, violation: float, maximum: float) -> float:
    theirs.weight.grad = torch.tensor([violation], dtype=torch.float64)
    optimizer.step()
    theirs.post_step_()
    # Cooper has no upper bound of its own.
    theirs.weight.data.clamp_(max=maximum)
    value: float = theirs().item()
    return value


@properties
@given(sequence=violations, value=st.floats(0, 5), lr=st.floats(0, 1))
@pytest.mark.parametrize("maximum", [5.0, math.inf])
def test_ascent_matches_cooper(
    sequence: list[float], value: float, lr: float, maximum: float
) -> None:
    ours = Multiplier(value=value, lr=lr, maximum=maximum, rule=Rule.ABSOLUTE)
    theirs = make_cooper(value)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=lr, maximize=True)
    for violation in sequence:
        expected = step_cooper(theirs, optimizer, violation, maximum)
        assert ours.step(violation, 0.0) == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert ours.value == pytest.approx(expected, rel=1e-12, abs=1e-12)


@properties
@given(sequence=violations, value=st.floats(0, 5), lr=st.floats(0, 1), gains=gains)
@pytest.mark.parametrize("maximum", [5.0, math.inf])
# Cooper allows a negative ν and warns of it.
@pytest.mark.filterwarnings("ignore:nuPI optimizer instantiated with negative EMA")
def test_nupi_matches_cooper(
    sequence: list[float], value: float, lr: float, gains: dict[str, Any], maximum: float
) -> None:
    ours = Multiplier(value=value, lr=lr, maximum=maximum, rule=Rule.ABSOLUTE, **gains)
    theirs = make_cooper(value)
    # As tensors, because Cooper makes float32 of a number.
    kp, ki = (torch.tensor(gains[name], dtype=torch.float64) for name in ("kp", "ki"))
    optimizer = nuPI(theirs.parameters(), lr=lr, Kp=kp, Ki=ki, ema_nu=gains["nu"], maximize=True)
    for violation in sequence:
        expected = step_cooper(theirs, optimizer, violation, maximum)
        # Terms of up to 2000 cancel.
        assert ours.step(violation, 0.0) == pytest.approx(expected, rel=1e-12, abs=1e-9)


@properties
@given(
    sequence=st.lists(st.floats(1, 6), min_size=1, max_size=50), gains=st.one_of(st.just({}), gains)
)
@pytest.mark.filterwarnings("ignore:nuPI optimizer instantiated with negative EMA")
def test_above_the_budget_the_relative_rule_is_coopers_in_units_of_it(
    sequence: list[float], gains: dict[str, Any]
) -> None:
    ours = Multiplier(value=1.0, lr=0.1, maximum=50.0, **gains)
    theirs = make_cooper(1.0)
    optimizer: Any = torch.optim.SGD(theirs.parameters(), lr=0.1, maximize=True)
    if gains:
        kp, ki = (torch.tensor(gains[name], dtype=torch.float64) for name in ("kp", "ki"))
        optimizer = nuPI(
            theirs.parameters(), lr=0.1, Kp=kp, Ki=ki, ema_nu=gains["nu"], maximize=True
        )
    for used in sequence:
        expected = step_cooper(theirs, optimizer, used - 1, 50.0)
        assert ours.step(used * 0.02, 0.02) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@properties
@given(
    loss=st.floats(0, 100),
    epsilon=st.floats(1e-6, 1e6),
    value=st.floats(0, 10),
    lr=st.floats(0, 10),
)
def test_λ_moves_towards_the_violation_and_never_falls_by_more_than_it_may(
    loss: float, epsilon: float, value: float, lr: float
) -> None:
    moved = Multiplier(value=value, lr=lr).step(loss, epsilon)
    if loss > epsilon:
        assert value <= moved <= value + lr * LARGEST_VIOLATION + 1e-9
    else:
        assert value - lr * value**2 - 1e-9 <= moved <= value
        assert moved > 0 or value == 0


def test_a_budget_of_zero_raises_λ_as_a_tiny_one_does() -> None:
    assert relative_violation(0.3, 0.0) == relative_violation(0.3, 1e-9) == LARGEST_VIOLATION
    assert relative_violation(0.0, 0.0) == 0.0
    assert relative_violation(-1e-9, 0.0) == 0.0
    multiplier = Multiplier(lr=0.1)
    assert multiplier.step(0.0, 0.0) == 1.0
    assert multiplier.step(1e-3, 0.0) == 1 + 0.1 * LARGEST_VIOLATION


def test_a_turn_that_stands_for_several_steps_moves_λ_as_far_as_they_would() -> None:
    once, five_times = Multiplier(every=5), Multiplier()
    once.step(0.022, 0.02)
    for _ in range(5):
        five_times.step(0.022, 0.02)
    assert once.value == pytest.approx(five_times.value)
    once.step(0.01, 0.02)
    for _ in range(5):
        five_times.step(0.01, 0.02)
    assert once.value == pytest.approx(five_times.value)
    # Upwards, one turn is never trusted with more than the largest step.
    largest = 1 + 0.02 * LARGEST_VIOLATION
    assert Multiplier(every=5).step(9.0, 0.02) == Multiplier().step(9.0, 0.02) == largest


def test_a_run_of_an_earlier_version_keeps_its_rule() -> None:
    resumed = Multiplier()
    resumed.load_state_dict({"value": 1.0})
    assert resumed.rule is Rule.ABSOLUTE
    assert resumed.step(0.06, 0.02) == pytest.approx(1 + 0.02 * 0.04)
    again = Multiplier()
    again.load_state_dict(resumed.state_dict())
    assert again.rule is Rule.ABSOLUTE
    assert Multiplier().state_dict() == {"value": 1.0, "rule": "balanced"}


def test_the_weighted_gradient_of_retention_is_at_most_twice_the_tasks() -> None:
    multiplier = Multiplier(value=3.0)
    assert multiplier.step(0.2, 0.02, gradient_ratio=0.75) == 1.5
    assert multiplier.bounded
    # Without a measurement λ moves on from there, and a smaller retention gradient lets it rise.
    assert multiplier.step(0.2, 0.02) == pytest.approx(1.5 + 0.02 * 9)
    assert multiplier.step(0.2, 0.02, gradient_ratio=5.0) == pytest.approx(1.5 + 0.04 * 9)
    assert not multiplier.bounded


def test_retention_keeps_a_weight_of_1_when_the_task_has_no_gradient() -> None:
    multiplier = Multiplier(value=3.0)
    assert multiplier.step(0.2, 0.02, gradient_ratio=0.0) == 1.0
    small = Multiplier(value=0.5)
    assert small.step(0.04, 0.02, gradient_ratio=0.0) == pytest.approx(0.52)
    assert not small.bounded


def test_a_bounded_multiplier_is_resumed_as_such() -> None:
    multiplier, resumed = Multiplier(), Multiplier()
    multiplier.step(0.2, 0.02, gradient_ratio=0.1)
    resumed.load_state_dict(multiplier.state_dict())
    assert resumed.bounded
    assert resumed.value == multiplier.value == 1.0


@pytest.mark.parametrize(
    "settings", [{"lr": 0.0}, {"rule": Rule.RELATIVE}, {"rule": Rule.ABSOLUTE}], ids=str
)
def test_a_fixed_multiplier_and_earlier_rules_have_no_such_bound(settings: dict[str, Any]) -> None:
    free, same = Multiplier(value=3.0, **settings), Multiplier(value=3.0, **settings)
    assert free.step(0.2, 0.02, gradient_ratio=0.1) == same.step(0.2, 0.02)
    assert not free.bounded


@properties
@given(sequence=violations)
def test_stays_within_its_bounds(sequence: list[float]) -> None:
    multiplier = Multiplier(lr=0.5, maximum=3.0)
    for violation in sequence:
        assert 0.0 <= multiplier.step(violation, 0.02) <= 3.0


def test_converges_to_the_multiplier_of_a_known_problem() -> None:
    """Minimise (x - 2)² subject to x² <= 1: x = 1 and λ = 1."""
    x, multiplier = 0.0, Multiplier(value=0.0, lr=0.05)
    for _ in range(2000):
        task, ret = 2 * (x - 2), 2 * x
        x -= 0.05 * (task + multiplier.value * ret)
        # At the solution the gradients balance, λ = |g_task| / |g_ret|: the bound leaves it free.
        multiplier.step(x * x, 1, gradient_ratio=abs(task / ret) if ret else None)
    assert x == pytest.approx(1.0, abs=1e-3)
    assert multiplier.value == pytest.approx(1.0, abs=1e-3)


def test_says_when_it_is_pinned() -> None:
    multiplier = Multiplier(rule=Rule.ABSOLUTE)
    assert (multiplier.at_zero, multiplier.at_maximum) == (False, False)
    multiplier.step(1e6, 0.02)
    assert multiplier.at_maximum
    assert multiplier.value == 10.0
    multiplier.step(-1e6, 0.02)
    assert multiplier.at_zero
    assert multiplier.value == 0.0
    assert Multiplier(value=0.05).at_zero


@pytest.mark.parametrize("violation", [math.nan, math.inf, -math.inf])
def test_a_violation_that_is_not_finite_changes_nothing(violation: float) -> None:
    multiplier = Multiplier(value=2.0)
    with pytest.raises(ValueError, match="not finite"):
        multiplier.step(violation, 0.02)
    assert multiplier.value == 2.0


@properties
@given(before=violations, after=violations, gains=st.one_of(st.just({}), gains))
def test_resumes_exactly_through_json(
    before: list[float], after: list[float], gains: dict[str, Any]
) -> None:
    straight, first = Multiplier(lr=0.3, **gains), Multiplier(lr=0.3, **gains)
    for violation in before:
        straight.step(violation, 0.02)
        first.step(violation, 0.02)
    resumed = Multiplier(lr=0.3, **gains)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [resumed.step(v, 0.02) for v in after] == [straight.step(v, 0.02) for v in after]


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5])
def test_a_broken_state_is_refused(value: float) -> None:
    multiplier = Multiplier(value=2.0)
    with pytest.raises(ValueError, match="saved multiplier"):
        multiplier.load_state_dict({"value": value})
    assert multiplier.value == 2.0


def test_a_broken_average_is_refused() -> None:
    multiplier = Multiplier(value=2.0, kp=1.0)
    with pytest.raises(ValueError, match="average"):
        multiplier.load_state_dict({"value": 1.0, "average": math.nan})
    assert multiplier.value == 2.0


def test_the_proportional_gain_damps_the_way_to_the_optimum() -> None:
    """What νPI is for: minimise (x - 2)² subject to x² <= 1 without overshooting λ = 1."""

    def overshoot(**gains: Any) -> float:
        x, multiplier = 0.0, Multiplier(value=0.0, lr=0.05, **gains)
        largest = 0.0
        for _ in range(2000):
            x -= 0.05 * (2 * (x - 2) + multiplier.value * 2 * x)
            multiplier.step(x * x, 1)
            largest = max(largest, multiplier.value)
        assert multiplier.value == pytest.approx(1.0, abs=1e-3)
        return largest - 1

    assert overshoot(kp=10.0) < overshoot() / 2


def test_a_loaded_value_respects_the_maximum_of_this_run() -> None:
    multiplier = Multiplier(maximum=3.0)
    multiplier.load_state_dict({"value": 7.0})
    assert multiplier.value == 3.0


@pytest.mark.parametrize(
    "settings",
    [
        {"value": -1.0},
        {"value": 11.0},
        {"value": math.nan},
        {"lr": -0.1},
        {"lr": math.nan},
        {"kp": -1.0},
        {"ki": math.inf},
        {"nu": 1.0},
        {"nu": math.nan},
    ],
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        Multiplier(**settings)


def test_repr() -> None:
    assert repr(Multiplier(value=0.5)) == "Multiplier(value=0.5, lr=0.02, maximum=10)"
    assert repr(Multiplier(kp=2)).endswith("maximum=10, kp=2, ki=1, nu=0)")
