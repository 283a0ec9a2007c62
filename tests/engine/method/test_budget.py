import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craftcli.choices import Schedule
from craftcli.engine.method.budget import epsilon_at, warmed_up

properties = settings(deadline=None, derandomize=True, max_examples=50)
bounds = st.floats(1e-6, 1e3)
PLANNED = [schedule for schedule in Schedule if schedule is not Schedule.AUTO]


@properties
@given(schedule=st.sampled_from(PLANNED), start=bounds, end=bounds, total=st.integers(1, 300))
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


def test_an_automatic_bound_is_not_planned() -> None:
    with pytest.raises(ValueError, match="AutoEpsilon"):
        epsilon_at(0, schedule=Schedule.AUTO, start=1.0, end=1.0, total_steps=10)


@properties
@given(lam=st.floats(0, 10), turns=st.integers(1, 50))
def test_warm_up_is_linear_and_ends(lam: float, turns: int) -> None:
    for turn in range(turns):
        assert warmed_up(lam, turn, turns=turns) == pytest.approx(lam * (turn + 1) / turns)
    assert warmed_up(lam, turns - 1, turns=turns) == lam
    assert warmed_up(lam, turns + 7, turns=turns) == lam


def test_without_turns_there_is_no_warm_up() -> None:
    assert warmed_up(0.3, 0, turns=0) == 0.3
