"""Means over seeds and their intervals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craftcli.compare.estimates import Rate, over_seeds, success_over_seeds

rates = st.integers(1, 60).flatmap(
    lambda trials: st.lists(
        st.integers(0, trials).map(lambda count: Rate(count=count, trials=trials)),
        min_size=1,
        max_size=5,
    )
)


@given(rates)
def test_the_interval_of_a_success_holds_its_mean_and_stays_in_bounds(found: list[Rate]) -> None:
    figure = success_over_seeds(found)
    assert figure.low is not None
    assert figure.high is not None
    assert 0 <= figure.low <= figure.mean <= figure.high <= 1


def test_seeds_that_all_succeed_are_not_sure_of_it() -> None:
    figure = success_over_seeds([Rate(count=15, trials=15)] * 3)
    assert (figure.mean, figure.high) == (1.0, 1.0)
    assert figure.low == pytest.approx(0.921, abs=0.001)


def test_seeds_that_disagree_widen_the_interval() -> None:
    """With 1000 episodes luck in the episodes is small; the seeds say another thing."""
    few = success_over_seeds([Rate(count=500, trials=1000)] * 2)
    far = success_over_seeds([Rate(count=0, trials=1000), Rate(count=1000, trials=1000)])
    assert few.low is not None
    assert few.low > 0.45
    assert (far.low, far.high) == (0.0, 1.0)


def test_one_seed_has_no_interval_of_seeds() -> None:
    figure = over_seeds([3.0])
    assert (figure.mean, figure.low, figure.high) == (3.0, None, None)
