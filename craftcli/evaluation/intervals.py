"""How sure one may be of a success rate."""

import math

Z_95 = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""


def wilson(successes: int, trials: int, *, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a rate: honest for few trials and near 0 and 1.

    >>> [round(bound, 3) for bound in wilson(15, 15)]
    [0.796, 1.0]
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"no rate: {successes} of {trials}")
    rate, shrink = successes / trials, 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / shrink
    # At the ends rounding would leave a bound just short of them.
    low = 0.0 if successes == 0 else centre - half
    return low, 1.0 if successes == trials else centre + half
