"""What a sweep tells about itself while it runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import fmean

type Bar = Callable[[int, str], AbstractContextManager[Callable[[int], None]]]
"""Opens a progress bar of so many units; calling what it gives advances it."""


@contextmanager
def no_bar(total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """For those who do not look."""
    yield lambda count: None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One piece of work of a sweep."""

    number: int
    """From 1."""
    total: int
    what: str
    """Such as "train hidden, seed 0"."""
    left_s: float | None
    """Estimate of the time to the end of the sweep; None before anything was timed."""


class Clock:
    """Estimates the time left from how long jobs of each kind took."""

    def __init__(self, kinds: list[str]) -> None:
        self._left = list(kinds)
        self._took: dict[str, list[float]] = {}

    def skip(self) -> None:
        """The next job was done before."""
        self._left.pop(0)

    def took(self, seconds: float) -> None:
        """The next job has been done."""
        self._took.setdefault(self._left.pop(0), []).append(seconds)

    @property
    def left_s(self) -> float | None:
        """Of all jobs to come; a kind that was never timed is taken to be like the others."""
        if not self._took:
            return None
        usual = fmean(s for seconds in self._took.values() for s in seconds)
        return sum(fmean(self._took.get(kind, [usual])) for kind in self._left)
