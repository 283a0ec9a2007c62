"""Confidence intervals of success rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from craftcli.evaluation.intervals import wilson


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_agrees_with_scipy_and_holds_the_rate(counts: tuple[int, int]) -> None:
    successes, trials = counts
    low, high = wilson(successes, trials)
    theirs = binomtest(successes, trials).proportion_ci(method="wilson")
    assert low == pytest.approx(theirs.low, abs=1e-9)
    assert high == pytest.approx(theirs.high, abs=1e-9)
    assert 0 <= low <= successes / trials <= high <= 1


def test_no_trials_is_no_rate() -> None:
    with pytest.raises(ValueError, match="0 of 0"):
        wilson(0, 0)
