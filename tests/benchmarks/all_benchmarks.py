"""All ratios that the README and the page on benchmarks quote, as one table.

    uv run python -m tests.benchmarks
    uv run python -m tests.benchmarks --only step,default --json
    uv run python -m tests.benchmarks --quick

Each row compares ways that one process runs in turn, several times; its range is that of the
rounds. `--quick` makes everything small: it shows that the benchmarks run, not what is true.
"""

import argparse
import importlib
import json
from dataclasses import asdict

from table import HEADER, Row, where

MODULES = {
    "step": "train_step",
    "default": "default_step",
    "sizes": "real_size",
    "read": "cache_read",
    "size": "bytes_per_row",
    "build": "build_throughput",
    "rows": "row_read",
    "made": "made_rows",
    "video": "video_anchors",
    "live": "live_teacher",
    "growth": "growth",
}
"""The script of each benchmark: its function `rows` returns what it measured."""


def measure(name: str, *, quick: bool) -> list[Row]:
    """The rows of one benchmark."""
    # Imported here, because each takes long.
    found: list[Row] = importlib.import_module(MODULES[name]).rows(quick=quick)
    return found


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.benchmarks")
    parser.add_argument("--only", default=",".join(MODULES), help="names, joined by commas")
    parser.add_argument("--quick", action="store_true", help="small and short: do they run?")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in MODULES]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(MODULES)}")
    rows = [row for name in names for row in measure(name, quick=arguments.quick)]
    if arguments.json:
        print(json.dumps({"where": where(), "rows": [asdict(row) for row in rows]}, indent=1))
        return
    print(where(), HEADER, *rows, sep="\n")
