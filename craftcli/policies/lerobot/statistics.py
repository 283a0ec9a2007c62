"""Which statistics normalise a feature: the teacher's, a dataset's, or the teacher's widened.

LeRobot's normaliser passes a feature on as it is if it finds no statistics under its name, and
divides by 1e-8 where a number stood still. Neither is an error, and neither is what anybody wants:

- *missing* or *inert* statistics (base models name them by robot, or have mean 0 and deviation 1):
  the policy would be trained in raw units.
- numbers that *stood still* in the old data have no scale: a new label becomes 1e8.
- data *far* from the old statistics: the policy sees and predicts large numbers. A number
  that moved a thousandth of what it moves now outweighs all others.

Everything here is numbers in, numbers out; `task_processors` applies it to a policy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from lerobot.configs import NormalizationMode
from numpy.typing import NDArray

from craftcli.choices import Stats

STILL = 1e-6
"""A spread that counts as none, relative to the size of the number itself."""
FAR = 5.0
"""How many of the old data's spreads new data may lie from their centre without a remark."""
OUT_OF_SCALE = 20.0
"""How many spreads away the data of a new task get statistics of their own.

Meta-World, ACT, plain fine-tuning, first seed: new success with the teacher's statistics, these
widened, and the dataset's is 0.00, 0.08, 0.96 where a number lies 1440 spreads away (door-open ->
pick-place), and 0.00, 0.00, 1.00 where it lies 22,000 away (reach -> door-open). Where numbers lie
up to 9 spreads away, the teacher's serve: 0.93 (pick-place -> door-open).
"""

USED = {
    NormalizationMode.MEAN_STD: ("mean", "std"),
    NormalizationMode.MIN_MAX: ("min", "max"),
    NormalizationMode.QUANTILES: ("q01", "q99"),
    NormalizationMode.QUANTILE10: ("q10", "q90"),
}
"""The two statistics that a mode reads. Other modes read none."""

type Numbers = Mapping[str, NDArray[Any]]
"""The statistics of one feature by name: mean, std, min, ..."""
type Statistics = Mapping[str, Numbers]
"""The statistics of several features, by the policy's names."""


class Origin(StrEnum):
    """Where the statistics of a feature come from."""

    TEACHER = "teacher"
    DATASET = "dataset"
    WIDENED = "widened"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature that the policy normalises."""

    name: str
    mode: NormalizationMode
    is_image: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureChoice:
    """The statistics that were chosen for one feature, and why."""

    feature: Feature
    origin: Origin
    numbers: Numbers | None
    """None if there are none: the feature is passed on in raw units."""
    why: str
    """One sentence."""
    remark: str | None = None
    """What the user should know: the choice is worth a warning."""


def choose(
    stats: Stats,
    feature: Feature,
    own: Numbers | None,
    new: Numbers,
    *,
    because: str = "by --stats dataset",
) -> FeatureChoice:
    """Choose the statistics of a feature from the teacher's own and those of a dataset.

    `new` must have the two statistics that the feature's mode reads. `because` is the reason for
    the dataset's, as a phrase.
    """
    name = feature.name
    problem = useless(feature, own)
    if stats is Stats.TEACHER or own is None or problem:
        if stats is Stats.TEACHER:
            return _keep_teacher(feature, own, new, problem)
        why = f"the teacher's {problem or 'are missing'}"
        return _chosen(feature, Origin.DATASET, new, f"{name}: the dataset's, because {why}.")
    # Pictures look much the same everywhere; LeRobot gives them ImageNet's statistics.
    if stats is Stats.DATASET and not feature.is_image:
        if _equal(feature, own, new):
            why = f"{name}: the dataset's, which are the teacher's."
            return _chosen(feature, Origin.TEACHER, own, why)
        return _chosen(feature, Origin.DATASET, new, f"{name}: the dataset's, {because}.")
    moving = _newly_moving(feature, own, new)
    if moving:
        why = f"{name}: the teacher's; {_numbers(moving)} stood still in its data and got a scale."
        widened = _widen(feature, own, new, moving)
        return _chosen(feature, Origin.WIDENED, widened, why, _far_remark(feature, widened, new))
    return _chosen(
        feature, Origin.TEACHER, own, f"{name}: the teacher's.", _far_remark(feature, own, new)
    )


def spreads_away(feature: Feature, own: Numbers, new: Numbers) -> float:
    """How far new data lie from the teacher's statistics, in spreads: the number furthest away.

    0 where the teacher's statistics say nothing, and for pictures.
    """
    if (
        useless(feature, own)
        or _scale(feature, own).centre.shape != _scale(feature, new).centre.shape
    ):
        return 0.0
    return float(_distance(feature, own, new).max(initial=0.0))


def serves_both(features: list[Feature], old: Statistics, new: Statistics) -> bool:
    """Whether the new statistics are the old ones, or these widened: old data look as before."""
    return all(
        _extends(feature, old[feature.name], new[feature.name])
        for feature in features
        if feature.name in old and feature.name in new
    ) and all((feature.name in old) == (feature.name in new) for feature in features)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Scale:
    """How a mode normalises: (x - centre) / spread, number by number."""

    centre: NDArray[np.float64]
    spread: NDArray[np.float64]

    @property
    def still(self) -> NDArray[np.bool_]:
        is_still: NDArray[np.bool_] = np.abs(self.spread) <= STILL * (1 + np.abs(self.centre))
        return is_still


def _scale(feature: Feature, numbers: Numbers) -> _Scale:
    first, second = (_flat(numbers[name]) for name in USED[feature.mode])
    if feature.mode is NormalizationMode.MEAN_STD:
        return _Scale(centre=first, spread=second)
    return _Scale(centre=(first + second) / 2, spread=(second - first) / 2)


def _flat(values: Any) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64).reshape(-1)


def useless(feature: Feature, own: Numbers | None) -> str | None:
    """Why the teacher's statistics say nothing of a feature; None if they do."""
    if own is None:
        return "are missing"
    lacking = [name for name in USED[feature.mode] if name not in own]
    if lacking:
        return f"lack {' and '.join(lacking)}"
    scale = _scale(feature, own)
    neutral = not scale.centre.any() and bool((scale.spread == 1).all())
    # A range of exactly -1 to 1 is common in real data, a mean of 0 with a deviation of 1 is not.
    if neutral and "mean" in own and "std" in own:
        neutral = not _flat(own["mean"]).any() and bool((_flat(own["std"]) == 1).all())
    elif feature.mode is not NormalizationMode.MEAN_STD:
        neutral = False
    return "are inert (mean 0, deviation 1)" if neutral else None


def _keep_teacher(
    feature: Feature, own: Numbers | None, new: Numbers, problem: str | None
) -> FeatureChoice:
    name = feature.name
    if own is None or (problem and problem.startswith("lack")):
        why = f"{name}: none, because the teacher's {problem}; it stays in raw units."
        return FeatureChoice(
            feature=feature,
            origin=Origin.NONE,
            numbers=None,
            why=why,
            remark=f"{why} --stats widen takes the dataset's.",
        )
    found = f"{name}: the teacher's {problem}." if problem else _far_remark(feature, own, new)
    moving = [] if problem else _newly_moving(feature, own, new)
    if moving:
        found = (
            f"{name}: {_numbers(moving)} stood still in the teacher's data and moves in the new: "
            "its normalised values are huge. --stats widen gives it a scale."
        )
    why = f"{name}: the teacher's, by --stats teacher."
    return _chosen(feature, Origin.TEACHER, own, why, found)


def _chosen(
    feature: Feature, origin: Origin, numbers: Numbers, why: str, remark: str | None = None
) -> FeatureChoice:
    return FeatureChoice(feature=feature, origin=origin, numbers=numbers, why=why, remark=remark)


def _equal(feature: Feature, own: Numbers, new: Numbers) -> bool:
    pairs = [(np.float32(own[name]), np.float32(new[name])) for name in USED[feature.mode]]
    return all(np.array_equal(a.reshape(-1), b.reshape(-1)) for a, b in pairs)


def _ends(feature: Feature, new: Numbers) -> Iterator[NDArray[np.float64]]:
    """The values between which the numbers move, by the statistics there are."""
    if "min" in new and "max" in new:
        yield from (_flat(new["min"]), _flat(new["max"]))
    else:
        scale = _scale(feature, new)
        yield from (scale.centre - 2 * scale.spread, scale.centre + 2 * scale.spread)


def _newly_moving(feature: Feature, own: Numbers, new: Numbers) -> list[int]:
    """The numbers that stood still in the old data and move in the new."""
    scale = _scale(feature, own)
    low, high = _ends(feature, new)
    centre = scale.centre
    reach = np.maximum(np.abs(low - centre), np.abs(high - centre))
    moves = scale.still & (reach > STILL * (1 + np.abs(centre)))
    found: list[int] = [] if feature.is_image else np.flatnonzero(moves).tolist()
    return found


def _widen(feature: Feature, own: Numbers, new: Numbers, numbers: list[int]) -> Numbers:
    """The teacher's statistics with a scale for these numbers.

    The old value keeps its normalised value (0, or -1 for a range), so that old inputs look as
    before and old outputs mean the same.
    """
    widened = {name: np.array(values) for name, values in own.items()}
    low, high = (end[numbers] for end in _ends(feature, new))
    centre = _scale(feature, own).centre[numbers]
    if "std" in widened and {"mean", "std"} <= new.keys():
        offset = _flat(new["mean"])[numbers] - centre
        spread = np.hypot(_flat(new["std"])[numbers], offset)
        reach = np.maximum(np.abs(high - centre), np.abs(low - centre))
        widened["std"][numbers] = np.where(spread > 0, spread, reach)
    first, second = USED[feature.mode]
    if "min" in widened and "max" in widened:
        widened["min"][numbers] = np.minimum(widened["min"][numbers], low)
        widened["max"][numbers] = np.maximum(widened["max"][numbers], high)
    if feature.mode is not NormalizationMode.MEAN_STD:
        # From the old value to the end that is further away; the range may run downwards.
        widened[first][numbers] = centre
        widened[second][numbers] = np.where(high - centre >= centre - low, high, low)
    return widened


def _distance(feature: Feature, own: Numbers, new: Numbers) -> NDArray[np.float64]:
    """How far new data lie from the centre, in spreads; 0 for images and numbers that stood still.

    (|new centre - centre| + new spread) / spread, number by number.
    """
    old, data = _scale(feature, own), _scale(feature, new)
    if feature.is_image:
        return np.zeros_like(old.centre)
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = (np.abs(data.centre - old.centre) + np.abs(data.spread)) / np.abs(old.spread)
    found: NDArray[np.float64] = np.where(old.still, 0.0, distance)
    return found


def _far_remark(feature: Feature, own: Numbers, new: Numbers) -> str | None:
    """A remark about data that lie far from the statistics; None if they do not."""
    distance = _distance(feature, own, new)
    far = np.flatnonzero(distance > FAR).tolist()
    if not far:
        return None
    worst = int(np.argmax(distance))
    return (
        f"{feature.name}: {_numbers(far)} of the new data lies up to {distance[worst]:.0f} spreads "
        "from the teacher's statistics. If the new task is learned badly, try --stats dataset, "
        "which normalises it with its own."
    )


def _extends(feature: Feature, old: Numbers, new: Numbers) -> bool:
    first, second = USED[feature.mode]
    if _flat(old[first]).shape != _flat(new[first]).shape:
        return False
    still = _scale(feature, old).still
    same_first = np.float32(_flat(old[first])) == np.float32(_flat(new[first]))
    same_second = np.float32(_flat(old[second])) == np.float32(_flat(new[second]))
    return bool(same_first.all() and (same_second | still).all())


def _numbers(positions: list[int]) -> str:
    shown = ", ".join(map(str, positions[:6])) + (" ..." if len(positions) > 6 else "")
    return f"number {shown}" if len(positions) == 1 else f"numbers {shown}"
