"""Pitfall 20: a λ stuck at an end is said, with what to change."""

import json

import pytest

from craftcli.engine.watch import LambdaWatch


def feed(watch: LambdaWatch, turns: int, *, lam: float, violated: bool) -> list[str]:
    warnings = [
        watch.observe(lam, at_maximum=lam == 10.0, at_zero=lam == 0.0, violated=violated)
        for _ in range(turns)
    ]
    return [warning for warning in warnings if warning]


def test_a_maximum_that_does_not_help_is_said_once() -> None:
    watch = LambdaWatch()
    assert feed(watch, 99, lam=10.0, violated=True) == []
    (warning,) = feed(watch, 500, lam=10.0, violated=True)
    for part in ("maximum of 10", "100 retention turns", "--epsilon-start", "--lambda-max", "--lr"):
        assert part in warning


def test_a_budget_that_never_binds_is_said_once() -> None:
    watch = LambdaWatch(patience=5)
    assert feed(watch, 4, lam=0.0, violated=False) == []
    (warning,) = feed(watch, 50, lam=0.0, violated=False)
    assert "does not bind" in warning
    assert "Lower --epsilon-start" in warning


def test_again_only_after_it_left_and_returned() -> None:
    watch = LambdaWatch(patience=5)
    assert len(feed(watch, 20, lam=10.0, violated=True)) == 1
    assert feed(watch, 1, lam=9.9, violated=True) == []
    assert feed(watch, 4, lam=10.0, violated=True) == []
    assert len(feed(watch, 20, lam=10.0, violated=True)) == 1
    assert len(feed(watch, 20, lam=0.0, violated=False)) == 1


@pytest.mark.parametrize(("lam", "violated"), [(10.0, False), (0.0, True), (5.0, True)])
def test_a_λ_that_its_settings_hold_is_no_warning(lam: float, violated: bool) -> None:
    assert feed(LambdaWatch(patience=2), 10, lam=lam, violated=violated) == []


def test_resumes_through_json() -> None:
    first, resumed = LambdaWatch(patience=5), LambdaWatch(patience=5)
    feed(first, 3, lam=10.0, violated=True)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert repr(resumed) == "LambdaWatch(end=maximum, turns=3, patience=5)"
    assert len(feed(resumed, 2, lam=10.0, violated=True)) == 1


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="patience"):
        LambdaWatch(patience=0)
