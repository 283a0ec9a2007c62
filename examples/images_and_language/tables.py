"""The figures as a table in Markdown: means over seeds with 95 % intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from table import NEW, OLD

from craftcli.compare.estimates import Rate, success_over_seeds

_COLUMNS = (
    "old, wordings of the data",
    "old, unheard wording",
    "new",
    "new, unheard wording",
    "probe: old blocks, R²",
)


def write_tables(results: Mapping[str, Mapping[str, Any]], arms: Sequence[str], file: Path) -> None:
    """One table of what is reported, and one of what settings were chosen by."""
    parts = []
    for title, tuning in (("Reported", False), ("Seed and episodes for tuning", True)):
        rows = [
            _row(name, own)
            for name in ("teacher", *arms)
            if (own := [v for k, v in results.get(name, {}).items() if (k == "tuning") is tuning])
        ]
        if rows:
            head = ["", "seeds", *_COLUMNS]
            lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
            parts.append(f"## {title}\n\n" + "\n".join(lines))
    file.write_text("# Figures of run.py\n\n" + "\n\n".join(parts) + "\n", "utf-8")


def _row(name: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [name, str(len(runs))]
    for colours in (OLD, (NEW,)):
        for kind in ("heard", "unheard"):
            estimate = success_over_seeds(
                [
                    Rate(
                        count=sum(run[kind][colour] for colour in colours),
                        trials=run["episodes"] * len(colours),
                    )
                    for run in runs
                ]
            )
            cells.append(f"{estimate.mean:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]")
    cells.append(f"{fmean(run['probe'][colour] for run in runs for colour in OLD):.2f}")
    return cells
