"""Estimates over seeds: a mean, and its 95 % interval."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

from craftcli.evaluation.results import wilson


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How many of its episodes one policy solved."""

    count: int
    trials: int

    @property
    def value(self) -> float:
        """The share of successes."""
        return self.count / self.trials


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds with its 95 % interval, if there is one."""

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]
    """One per seed."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "values": list(self.values)}


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean, with Student's interval if there are at least two seeds.

    >>> over_seeds([1.0, 2.0, 3.0]).high
    4.484137711531297
    """
    mean = fmean(values)
    low, high = _student(values) if len(values) > 1 else (None, None)
    return Estimate(mean=mean, low=low, high=high, values=tuple(values))


def success_over_seeds(rates: Sequence[Rate]) -> Estimate:
    """The mean success, with an interval that covers chance in the episodes and in the seeds.

    It is Wilson's interval over all episodes, widened to Student's interval over the seeds.
    Student's alone has no width if all seeds reach 1.00; Wilson's alone ignores that seeds differ.
    """
    values = tuple(rate.value for rate in rates)
    low, high = wilson(sum(r.count for r in rates), sum(r.trials for r in rates))
    if len(values) > 1:
        low_seeds, high_seeds = _student(values)
        low, high = max(0.0, min(low, low_seeds)), min(1.0, max(high, high_seeds))
    return Estimate(mean=fmean(values), low=low, high=high, values=values)


def _student(values: Sequence[float]) -> tuple[float, float]:
    quantile = float(stdtrit(len(values) - 1, 0.975))
    half = quantile * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half
