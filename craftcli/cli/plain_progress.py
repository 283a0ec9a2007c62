"""Progress as plain lines, for a log file or a pipe, where a bar cannot be drawn."""

import time
from collections.abc import Callable

INTERVAL_S = 10.0
"""Time between two lines."""


class PlainProgress:
    """Prints how far something got, at most one line in ten seconds."""

    def __init__(
        self,
        name: str,
        total: int,
        unit: str,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._total = total
        self._unit = unit
        self._say = say
        self._clock = clock
        self._done = 0
        self._started = self._last = clock()

    def advance(self, count: int) -> None:
        """Add what was done; print a line if the last one is old enough."""
        self._done += count
        now = self._clock()
        if now - self._last >= INTERVAL_S:
            self._last = now
            self._say(self._line(now - self._started))

    def _line(self, seconds: float) -> str:
        rate = self._done / seconds
        line = f"{self._done}/{self._total} {self._unit}, {rate:.1f} {self._unit}/s"
        if 0 < self._done < self._total:
            line += f", about {_duration((self._total - self._done) / rate)} left"
        return f"{self._name}: {line}" if self._name else line


def _duration(seconds: float) -> str:
    """A time as people read it.

    >>> _duration(75), _duration(4000)
    ('1:15', '1:06:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
