"""Reports the progress of a sweep: the current job, and the time that is left."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import fmean

type Bar = Callable[[int, str, str], AbstractContextManager[Callable[[int], None]]]
"""Opens a progress bar with a total, a unit and a name; the value of the context advances it."""


@contextmanager
def no_bar(total: int, unit: str, name: str) -> Iterator[Callable[[int], None]]:
    """A `Bar` that shows nothing."""
    yield lambda count: None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of a sweep that is about to start."""

    number: int
    """From 1."""
    total: int
    what: str
    """Such as "train hidden, seed 0"."""
    left_s: float | None
    """Estimated time to the end of the sweep; None before the first job was timed."""


class Clock:
    """Estimates the time left from how long jobs of each kind took."""

    def __init__(self, kinds: list[str]) -> None:
        self._left = list(kinds)
        self._took: dict[str, list[float]] = {}

    def skip(self) -> None:
        """Record that the next job needs no time."""
        self._left.pop(0)

    def took(self, seconds: float) -> None:
        """Record how long the next job took."""
        self._took.setdefault(self._left.pop(0), []).append(seconds)

    @property
    def left_s(self) -> float | None:
        """Time of all jobs left; a kind that was never timed counts as the mean of the others."""
        if not self._took:
            return None
        usual = fmean(s for seconds in self._took.values() for s in seconds)
        return sum(fmean(self._took.get(kind, [usual])) for kind in self._left)
