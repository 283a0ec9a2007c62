"""Which statistics are chosen for a feature, by the teacher's and the dataset's."""

from typing import Any

import numpy as np
import pytest
from lerobot.configs import NormalizationMode

from craftcli.choices import Stats
from craftcli.policies.lerobot.statistics import (
    USED,
    Feature,
    FeatureChoice,
    Origin,
    choose,
    serves_both,
    spreads_away,
)

MEAN_STD, MIN_MAX = NormalizationMode.MEAN_STD, NormalizationMode.MIN_MAX
QUANTILES = NormalizationMode.QUANTILES


def feature(mode: NormalizationMode, *, is_image: bool = False) -> Feature:
    return Feature(name="action", mode=mode, is_image=is_image)


def numbers(low: list[float], high: list[float]) -> dict[str, Any]:
    """All statistics of numbers that are as often at one end as at the other."""
    ends = np.array([low, high], dtype=float)
    names = {"min": 0, "q01": 0, "q10": 0, "max": 1, "q99": 1, "q90": 1}
    found = {name: ends[end].copy() for name, end in names.items()}
    return {**found, "mean": ends.mean(0), "std": ends.std(0)}


OWN = numbers([-1.0, -2.0, 0.5], [1.0, 2.0, 0.5])
"""The third number stood still at 0.5."""
NEW = numbers([-1.0, -2.0, 0.0], [1.0, 2.0, 2.5])


def normalise(mode: NormalizationMode, stats: Any, x: Any) -> Any:
    """LeRobot's formulas."""
    first, second = (np.asarray(stats[name]) for name in USED[mode])
    if mode is MEAN_STD:
        return (x - first) / (second + 1e-8)
    width = np.where(second == first, 1e-8, second - first)
    return 2 * (x - first) / width - 1


@pytest.mark.parametrize("stats", list(Stats))
@pytest.mark.parametrize("mode", list(USED))
def test_statistics_that_fit_stay(stats: Stats, mode: NormalizationMode) -> None:
    own = numbers([-1.0, 3.0], [1.0, 4.0])
    chosen = choose(stats, feature(mode), own, own)
    assert chosen.origin is Origin.TEACHER
    assert chosen.numbers is own
    assert chosen.remark is None


@pytest.mark.parametrize("mode", list(USED))
def test_missing_statistics_are_the_datasets_or_none(mode: NormalizationMode) -> None:
    for stats in (Stats.WIDEN, Stats.DATASET):
        chosen = choose(stats, feature(mode), None, NEW)
        assert (chosen.origin, chosen.numbers) == (Origin.DATASET, NEW)
        assert chosen.why == "action: the dataset's, because the teacher's are missing."
    kept = choose(Stats.TEACHER, feature(mode), None, NEW)
    assert (kept.origin, kept.numbers) == (Origin.NONE, None)
    assert kept.remark
    assert "raw units" in kept.remark


def test_statistics_of_another_mode_count_as_missing() -> None:
    own = {"mean": np.zeros(3), "std": np.full(3, 0.5)}
    assert "lack q01 and q99" in choose(Stats.WIDEN, feature(QUANTILES), own, NEW).why


def test_mean_0_and_deviation_1_are_inert() -> None:
    neutral = {"mean": np.zeros(3), "std": np.ones(3)}
    chosen = choose(Stats.WIDEN, feature(MEAN_STD), neutral, NEW)
    assert chosen.origin is Origin.DATASET
    assert "inert" in chosen.why
    ranged = {**neutral, "min": -np.ones(3), "max": np.ones(3)}
    assert choose(Stats.WIDEN, feature(MIN_MAX), ranged, NEW).origin is Origin.DATASET
    kept = choose(Stats.TEACHER, feature(MEAN_STD), neutral, NEW)
    assert kept.origin is Origin.TEACHER
    assert kept.remark == "action: the teacher's are inert (mean 0, deviation 1)."


def test_a_range_of_minus_1_to_1_is_not_inert_by_itself() -> None:
    """Actions of many simulators have exactly this range."""
    own = {"min": -np.ones(2), "max": np.ones(2)}
    new = numbers([-1.0, -1.0], [1.0, 1.0])
    for known in (own, {**own, "mean": np.full(2, 0.1), "std": np.full(2, 0.6)}):
        assert choose(Stats.WIDEN, feature(MIN_MAX), known, new).origin is Origin.TEACHER


@pytest.mark.parametrize("mode", list(USED))
def test_widening_gives_a_scale_and_keeps_what_the_old_data_look_like(
    mode: NormalizationMode,
) -> None:
    chosen = choose(Stats.WIDEN, feature(mode), OWN, NEW)
    assert chosen.origin is Origin.WIDENED
    assert "number 2 stood still" in chosen.why
    assert chosen.numbers
    old = np.array([[-1.0, 1.5, 0.5], [0.3, -2.0, 0.5]])
    before, after = (normalise(mode, stats, old) for stats in (OWN, chosen.numbers))
    np.testing.assert_array_equal(before, after)
    ends = normalise(mode, chosen.numbers, np.array([[0, 0, 0.0], [0, 0, 2.5]]))[:, 2]
    assert np.abs(ends).max() < 3
    assert abs(ends[1] - ends[0]) > 1
    assert serves_both([feature(mode)], {"action": OWN}, {"action": chosen.numbers})
    assert not serves_both([feature(mode)], {"action": OWN}, {"action": numbers([0] * 3, [1] * 3)})


def test_a_range_widens_towards_the_further_end() -> None:
    down = numbers([-1.0, -2.0, -3.0], [1.0, 2.0, 0.6])
    chosen = choose(Stats.WIDEN, feature(MIN_MAX), OWN, down)
    assert chosen.numbers
    assert normalise(MIN_MAX, chosen.numbers, np.array([0, 0, 0.5]))[2] == -1
    assert normalise(MIN_MAX, chosen.numbers, np.array([0, 0, -3.0]))[2] == 1


def test_numbers_that_still_stand_still_are_left_alone() -> None:
    chosen = choose(Stats.WIDEN, feature(MEAN_STD), OWN, OWN)
    assert chosen.origin is Origin.TEACHER
    kept = choose(Stats.TEACHER, feature(MEAN_STD), OWN, NEW)
    assert kept.numbers is OWN
    assert kept.remark
    assert "number 2 stood still" in kept.remark
    assert "--stats widen" in kept.remark


def test_data_far_from_the_statistics_are_remarked_on() -> None:
    far = numbers([-1.0, 30.0, 0.5], [1.0, 40.0, 0.5])
    chosen = choose(Stats.WIDEN, feature(MEAN_STD), OWN, far)
    assert chosen.origin is Origin.TEACHER
    assert chosen.remark
    assert "number 1 of the new data" in chosen.remark
    assert "--stats dataset" in chosen.remark
    other = choose(Stats.DATASET, feature(MEAN_STD), OWN, far)
    assert (other.origin, other.numbers, other.remark) == (Origin.DATASET, far, None)


def test_how_far_new_data_lie() -> None:
    # The first number is at most 6 deviations away, the second 250; the third stood still.
    new = numbers([5.0, 400.0, 0.0], [6.0, 500.0, 2.5])
    assert spreads_away(feature(MEAN_STD), OWN, new) == pytest.approx(250)
    assert spreads_away(feature(MIN_MAX), OWN, OWN) == pytest.approx(1)
    assert spreads_away(feature(MEAN_STD, is_image=True), OWN, new) == 0
    inert = {"mean": np.zeros(3), "std": np.ones(3)}
    assert spreads_away(feature(MEAN_STD), inert, new) == 0
    # Another robot's size is refused elsewhere.
    assert spreads_away(feature(MEAN_STD), numbers([0.0], [1.0]), new) == 0


def test_pictures_keep_their_statistics() -> None:
    def picture(stats: Stats) -> FeatureChoice:
        return choose(stats, feature(MEAN_STD, is_image=True), OWN, NEW)

    assert [picture(stats).origin for stats in Stats] == [Origin.TEACHER] * 3
