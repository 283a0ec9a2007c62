"""The figures as data and as tables in Markdown: means over seeds with 95 % intervals."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from measures import Later, Measured, Recoloured
from table import NEW, OLD

from craftcli.compare.estimates import Rate, success_over_seeds

LATER_FILE, RECOLOURED_FILE, TABLES_FILE = "later.json", "recoloured.json", "tables.md"
_COLUMNS = (
    "old, wordings of the data",
    "old, unheard wording",
    "new",
    "new, unheard wording",
    "probe: old blocks, R²",
)

_BY = "successes"

type Figures = dict[str, dict[str, Any]]
"""By arm, then by seed."""


class Report:
    """What was measured, in a file, with the tables beside it; what is in the file is kept."""

    def __init__(self, file: Path, arms: Sequence[str]) -> None:
        self._file, self._arms = file, ("teacher", *arms)
        self._measured, self._later = _read(file), _read(file.with_name(LATER_FILE))
        self._recoloured = _read(file.with_name(RECOLOURED_FILE))

    def has(self, arm: str, seed: str) -> bool:
        """Whether an arm was measured with a seed."""
        return seed in self._measured.get(arm, {})

    def has_later(self, arm: str, seed: int) -> bool:
        """Whether the task that is learned afterwards was measured."""
        return str(seed) in self._later.get(arm, {})

    def add(self, arm: str, seed: str, found: Measured) -> None:
        """Keep what was measured, and renew the tables."""
        self._measured.setdefault(arm, {})[seed] = asdict(found)
        self._write(self._file, self._measured)

    def add_later(self, arm: str, seed: int, found: Later) -> None:
        """The same for the task that is learned afterwards."""
        self._later.setdefault(arm, {})[str(seed)] = asdict(found)
        self._write(self._file.with_name(LATER_FILE), self._later)

    def has_recoloured(self, arm: str, seed: str) -> bool:
        """Whether an arm was measured among faded blocks with a seed."""
        return seed in self._recoloured.get(arm, {})

    def add_recoloured(self, arm: str, seed: str, found: Recoloured) -> None:
        """The same among faded blocks."""
        self._recoloured.setdefault(arm, {})[seed] = asdict(found)
        self._write(self._file.with_name(RECOLOURED_FILE), self._recoloured)

    def _write(self, file: Path, figures: Figures) -> None:
        file.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
        text = tables(self._measured, self._later, self._recoloured, self._arms)
        self._file.with_name(TABLES_FILE).write_text(text, "utf-8")


def _read(file: Path) -> Figures:
    figures: Figures = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return figures


def tables(measured: Figures, later: Figures, recoloured: Figures, arms: Sequence[str]) -> str:
    """What is reported, what comes afterwards, and what settings were chosen by."""
    reported, tuning = _split(measured, "tuning")
    afterwards, _ = _split(later, "0")
    faded, _ = _split(recoloured, "tuning")
    parts = ["# Figures of run.py"]
    for title, figures, columns, cells in (
        ("Reported", reported, _COLUMNS, _cells),
        ("A third task, learned afterwards", afterwards, _later_columns(later), _later_cells),
        ("Blocks faded towards grey", faded, _faded_columns(faded), _faded_cells),
        ("Seed and episodes for tuning", tuning, _COLUMNS, _cells),
    ):
        rows = [
            [arm, str(len(figures[arm])), *cells(list(figures[arm].values()))]
            for arm in arms
            if figures.get(arm)
        ]
        if rows:
            head = ["", "seeds", *columns]
            lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
            parts.append(f"## {title}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _split(figures: Figures, tuning: str) -> tuple[Figures, Figures]:
    """Figures that are reported, and those of the seed that settings are chosen with."""
    reported = {a: {s: v for s, v in own.items() if s != tuning} for a, own in figures.items()}
    chosen = {a: {s: v for s, v in own.items() if s == tuning} for a, own in figures.items()}
    return reported, chosen


def _cells(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [
        _estimate(
            (sum(run[kind][colour] for colour in colours), run["episodes"] * len(colours))
            for run in runs
        )
        for colours in (OLD, (NEW,))
        for kind in ("heard", "unheard")
    ]
    return [*cells, f"{fmean(run['probe'][colour] for run in runs for colour in OLD):.2f}"]


def _later_columns(later: Figures) -> list[str]:
    steps = {step for own in later.values() for run in own.values() for step in run["successes"]}
    return [f"after {step} steps" for step in sorted(steps, key=int)]


def _later_cells(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    steps = sorted(runs[0]["successes"], key=int)
    return [_estimate((run["successes"][step], run["episodes"]) for run in runs) for step in steps]


def _faded_columns(recoloured: Figures) -> list[str]:
    shares = {share for own in recoloured.values() for run in own.values() for share in run[_BY]}
    return [f"{kind}, {float(s):.0%} grey" for kind in ("old", "new") for s in sorted(shares)]


def _faded_cells(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        _estimate(
            (sum(run[_BY][share][colour] for colour in colours), run["episodes"] * len(colours))
            for run in runs
        )
        for colours in (OLD, (NEW,))
        for share in sorted(runs[0][_BY])
    ]


def _estimate(counts: Iterable[tuple[int, int]]) -> str:
    """Successes and episodes of each run as a mean with its interval."""
    found = success_over_seeds([Rate(count=count, trials=trials) for count, trials in counts])
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"
