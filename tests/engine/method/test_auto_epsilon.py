import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craftcli.engine.method.budget import AutoEpsilon

properties = settings(deadline=None, derandomize=True, max_examples=50)
losses = st.lists(st.floats(0, 1e3), min_size=20, max_size=60)


def watch(auto: AutoEpsilon, sequence: list[float]) -> list[str]:
    return [reason for loss in sequence if (reason := auto.observe(loss))]


def ramp(start: float, end: float, turns: int = 20) -> list[float]:
    return [start + (end - start) * turn / (turns - 1) for turn in range(turns)]


def test_nothing_is_bounded_until_enough_turns_were_seen() -> None:
    auto = AutoEpsilon(floor=0.0)
    assert watch(auto, ramp(0.0, 0.1)[:-1]) == []
    assert auto.value == math.inf
    assert not auto.fixed
    assert auto.reason == ""


@pytest.mark.parametrize(
    ("floor", "scale"),
    [(1e-13, 0.05), (0.8, 0.3), (0.0, 1e-9), (2.3, 1e3)],
    ids=["nmse", "cross-entropy", "distance in weights", "off scale"],
)
def test_half_of_the_rise_whatever_the_scale(floor: float, scale: float) -> None:
    auto = AutoEpsilon(floor=floor)
    (reason,) = watch(auto, ramp(floor, floor + scale))
    # The median of the later half is at 14.5 of 19 on a straight line.
    assert auto.value == pytest.approx(floor + 0.5 * scale * 14.5 / 19)
    assert reason == auto.reason
    assert "50% of the rise" in reason
    assert f"ε = {auto.value:.3g}" in reason


def test_a_loss_that_does_not_rise_gets_headroom_above_its_floor() -> None:
    auto = AutoEpsilon(floor=2.0)
    (reason,) = watch(auto, [1.9, 2.02] * 10)
    assert auto.value == pytest.approx(2.1)
    assert "5% above the floor" in reason


def test_a_rise_within_rounding_is_not_a_budget() -> None:
    auto = AutoEpsilon(floor=1e-4, rounding=1e-2)
    (reason,) = watch(auto, ramp(1e-4, 1e-3))
    assert auto.value == 1e-2
    assert "rounding" in reason


def test_a_run_that_has_not_moved_yet_is_watched_on() -> None:
    auto = AutoEpsilon(floor=0.0)
    assert watch(auto, [0.0] * 50) == []
    assert len(watch(auto, ramp(0.0, 0.1))) == 1
    assert 0 < auto.value < 0.05


def test_one_wild_turn_does_not_decide() -> None:
    auto = AutoEpsilon(floor=0.0)
    watch(auto, [*ramp(0.0, 0.1)[:-1], 1e6])
    assert auto.value < 0.05


@properties
@given(sequence=losses, floor=st.floats(0, 10), rounding=st.floats(0, 1e-2))
def test_the_budget_is_reachable_and_fixed_once(
    sequence: list[float], floor: float, rounding: float
) -> None:
    auto = AutoEpsilon(floor=floor, rounding=rounding)
    reasons = watch(auto, sequence)
    assert len(reasons) == auto.fixed
    if auto.fixed:
        assert auto.value >= max(floor, rounding)
        assert auto.value > 0
        assert auto.value <= max(1.05 * floor, rounding, floor + 0.5 * max(sequence))


@properties
@given(sequence=losses, cut=st.integers(0, 30))
def test_resumes_exactly_through_json(sequence: list[float], cut: int) -> None:
    straight, first = AutoEpsilon(floor=0.5), AutoEpsilon(floor=0.5)
    watch(straight, sequence)
    before = watch(first, sequence[:cut])
    # The resumed run cannot measure the floor any more.
    resumed = AutoEpsilon(floor=0.0)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    after = watch(resumed, sequence[cut:])
    assert (resumed.value, resumed.reason) == (straight.value, straight.reason)
    assert before + after == [straight.reason]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_refused(loss: float) -> None:
    auto = AutoEpsilon(floor=0.0)
    with pytest.raises(ValueError, match="not finite"):
        auto.observe(loss)
    assert auto.state_dict()["watched"] == []


@pytest.mark.parametrize(
    "settings", [{"floor": -1.0}, {"floor": math.nan}, {"share": -0.5}, {"rounding": math.inf}]
)
def test_settings_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        AutoEpsilon(**{"floor": 0.0, **settings})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        AutoEpsilon(floor=0.0, turns=0)


def test_repr() -> None:
    auto = AutoEpsilon(floor=0.5)
    auto.observe(1.0)
    assert repr(auto) == "AutoEpsilon(value=inf, floor=0.5, watched=1/20)"
