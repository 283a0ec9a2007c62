import json
import math
from itertools import pairwise

import pytest
import torch
from cooper.multipliers import DenseMultiplier
from cooper.utils import ConstraintType
from hypothesis import given, settings
from hypothesis import strategies as st

from craftcli.choices import Schedule
from craftcli.engine.dual import Multiplier, epsilon_at

properties = settings(deadline=None, derandomize=True, max_examples=50)
bounds = st.floats(1e-6, 1e3)
violations = st.lists(st.floats(-100, 100), min_size=1, max_size=50)


@properties
@given(schedule=st.sampled_from(Schedule), start=bounds, end=bounds, total=st.integers(1, 300))
def test_epsilon_is_monotone_between_its_ends(
    schedule: Schedule, start: float, end: float, total: int
) -> None:
    def at(step: int) -> float:
        return epsilon_at(step, schedule=schedule, start=start, end=end, total_steps=total)

    last = start if schedule is Schedule.CONSTANT else end
    assert at(0) == start
    assert at(total) == at(total + 7) == last
    values = [at(step) for step in range(total + 1)]
    sign = math.copysign(1.0, last - start)
    slack = 1e-12 * max(start, end)
    assert all(sign * (b - a) >= -slack for a, b in pairwise(values))
    assert all(min(start, end) <= value <= max(start, end) for value in values)


@pytest.mark.parametrize(
    ("schedule", "quarter", "half"),
    [
        (Schedule.CONSTANT, 1.0, 1.0),
        (Schedule.LINEAR, 0.7525, 0.505),
        (Schedule.COSINE, 0.01 + 0.99 * (1 + math.sqrt(0.5)) / 2, 0.505),
        (Schedule.EXPONENTIAL, 0.01**0.25, 0.1),
    ],
)
def test_epsilon_values(schedule: Schedule, quarter: float, half: float) -> None:
    for step, expected in ((50, quarter), (100, half)):
        value = epsilon_at(step, schedule=schedule, start=1.0, end=0.01, total_steps=200)
        assert value == pytest.approx(expected)


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0)])
@pytest.mark.parametrize("step", [0, 5, 10])
def test_exponential_needs_positive_bounds(start: float, end: float, step: int) -> None:
    with pytest.raises(ValueError, match="positive bounds"):
        epsilon_at(step, schedule=Schedule.EXPONENTIAL, start=start, end=end, total_steps=10)


@properties
@given(sequence=violations, value=st.floats(0, 5), lr=st.floats(0, 1))
@pytest.mark.parametrize("maximum", [5.0, math.inf])
def test_ascent_matches_cooper(
    sequence: list[float], value: float, lr: float, maximum: float
) -> None:
    ours = Multiplier(value=value, lr=lr, maximum=maximum)
    init = torch.tensor([value], dtype=torch.float64)
    theirs = DenseMultiplier(init=init, dtype=torch.float64)
    theirs.set_constraint_type(ConstraintType.INEQUALITY)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=lr, maximize=True)
    for violation in sequence:
        theirs.weight.grad = torch.tensor([violation], dtype=torch.float64)
        optimizer.step()
        theirs.post_step_()
        # Cooper has no upper bound of its own.
        theirs.weight.data.clamp_(max=maximum)
        assert ours.step(violation) == pytest.approx(theirs().item(), rel=1e-12, abs=1e-12)
        assert ours.value == pytest.approx(theirs().item(), rel=1e-12, abs=1e-12)


@properties
@given(sequence=violations)
def test_stays_within_its_bounds(sequence: list[float]) -> None:
    multiplier = Multiplier(lr=0.5, maximum=3.0)
    for violation in sequence:
        assert 0.0 <= multiplier.step(violation) <= 3.0


def test_converges_to_the_multiplier_of_a_known_problem() -> None:
    """Minimise (x - 2)² subject to x² <= 1: x = 1 and λ = 1."""
    x, multiplier = 0.0, Multiplier(value=0.0, lr=0.05)
    for _ in range(2000):
        x -= 0.05 * (2 * (x - 2) + multiplier.value * 2 * x)
        multiplier.step(x * x - 1)
    assert x == pytest.approx(1.0, abs=1e-3)
    assert multiplier.value == pytest.approx(1.0, abs=1e-3)


def test_says_when_it_is_pinned() -> None:
    multiplier = Multiplier()
    assert not multiplier.at_zero
    assert not multiplier.at_maximum
    multiplier.step(1e6)
    assert multiplier.at_maximum
    assert multiplier.value == 10.0
    multiplier.step(-1e6)
    assert multiplier.at_zero
    assert multiplier.value == 0.0


@pytest.mark.parametrize("violation", [math.nan, math.inf, -math.inf])
def test_a_violation_that_is_not_finite_changes_nothing(violation: float) -> None:
    multiplier = Multiplier(value=2.0)
    with pytest.raises(ValueError, match="not finite"):
        multiplier.step(violation)
    assert multiplier.value == 2.0


@properties
@given(before=violations, after=violations)
def test_resumes_exactly_through_json(before: list[float], after: list[float]) -> None:
    straight, first = Multiplier(lr=0.3), Multiplier(lr=0.3)
    for violation in before:
        straight.step(violation)
        first.step(violation)
    resumed = Multiplier(lr=0.3)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [resumed.step(v) for v in after] == [straight.step(v) for v in after]


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5])
def test_a_broken_state_is_refused(value: float) -> None:
    multiplier = Multiplier(value=2.0)
    with pytest.raises(ValueError, match="saved multiplier"):
        multiplier.load_state_dict({"value": value})
    assert multiplier.value == 2.0


def test_a_loaded_value_respects_the_maximum_of_this_run() -> None:
    multiplier = Multiplier(maximum=3.0)
    multiplier.load_state_dict({"value": 7.0})
    assert multiplier.value == 3.0


@pytest.mark.parametrize(
    "settings",
    [{"value": -1.0}, {"value": 11.0}, {"value": math.nan}, {"lr": -0.1}, {"lr": math.nan}],
)
def test_settings_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        Multiplier(**settings)


def test_repr() -> None:
    assert repr(Multiplier(value=0.5)) == "Multiplier(value=0.5, lr=0.01, maximum=10)"
