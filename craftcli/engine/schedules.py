"""What moves with time by plan: the bound ε(t), and λ while it warms up."""

import math

from craftcli.choices import Schedule


def epsilon_at(
    step: int, *, schedule: Schedule, start: float, end: float, total_steps: int
) -> float:
    """The bound at a step: `start` at 0, `end` from `total_steps` on, monotone in between.

    A constant bound stays at `start`; an exponential one changes by the same factor every step.
    """
    if schedule is Schedule.EXPONENTIAL and not (start > 0 and end > 0):
        raise ValueError(f"an exponential schedule needs positive bounds, got {start} and {end}")
    if schedule is Schedule.AUTO:
        raise ValueError("an automatic bound depends on the run: it is AutoEpsilon's")
    if schedule is Schedule.CONSTANT:
        return start
    if step >= total_steps:
        return end
    progress = max(step, 0) / total_steps
    match schedule:
        case Schedule.LINEAR:
            value = start + (end - start) * progress
        case Schedule.COSINE:
            value = start + (end - start) * (1 - math.cos(math.pi * progress)) / 2
        case Schedule.EXPONENTIAL:
            value = start * (end / start) ** progress
    # Rounding may not carry the bound past either end.
    return min(max(value, min(start, end)), max(start, end))


def warmed_up(lam: float, turn: int, *, turns: int) -> float:
    """The λ that gradients are merged with: λ · min(1, (turn + 1) / turns).

    Turns are retention turns and count from 0; the dual step goes on meanwhile, with λ itself. No
    turns, no warm-up.

    >>> [warmed_up(2.0, turn, turns=4) for turn in range(5)]
    [0.5, 1.0, 1.5, 2.0, 2.0]
    """
    return lam if turn + 1 >= turns else lam * ((turn + 1) / turns)
