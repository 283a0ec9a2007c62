"""What every benchmark returns: rows of one table of ratios."""

import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Row:
    """One ratio: what was compared, the median over rounds, and the range of the rounds."""

    compared: str
    measure: str
    """What the ratio is of: processor time, wall clock, bytes, peak memory."""
    ratio: float
    least: float | None = None
    largest: float | None = None
    """None if it was measured once."""
    at_most: float | None = None
    """The bound to keep; None if there is none."""

    def __str__(self) -> str:
        spread = "" if self.least is None else f"{self.least:.2f} to {self.largest:.2f}"
        bound = "" if self.at_most is None else f"{self.at_most:.2f}"
        return f"| {self.compared} | {self.measure} | {self.ratio:.2f} | {spread} | {bound} |"


HEADER = "| compared | of | ratio | range | at most |\n|---|---|---|---|---|"


def row_of(
    compared: str, measure: str, ratios: Sequence[float], *, at_most: float | None = None
) -> Row:
    """The median of the ratios of all rounds, with their range."""
    return Row(
        compared=compared,
        measure=measure,
        ratio=statistics.median(ratios),
        least=min(ratios),
        largest=max(ratios),
        at_most=at_most,
    )


def machine() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def where() -> str:
    """One line on when and where figures were measured."""
    load = os.getloadavg()[0]
    return f"{datetime.date.today()}, {os.cpu_count()} cores {machine()}, load {load:.1f}"
