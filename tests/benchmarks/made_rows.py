"""A batch of made image rows beside plain ones: what making inputs again from recipes costs.

    uv run python tests/benchmarks/made_rows.py

The demo's teacher and old task (one camera). Three caches: rows with their images embedded, frames
whose images are read from the dataset, and mixtures of frames that are made again by their recipe.
A batch is read from each in turn, in one process, as training reads it; median of the ratios. The
dataset is small, so that its frames stay in memory, as they do in training.
"""

import os
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import typer
from table import Row, row_of

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from craftcli.cache.build.build import build_cache
from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Images, Kind
from craftcli.config.cache import CacheConfig
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.engine.retention.opening import open_anchors
from craftcli.sources import open_anchor_data, open_policy

EMBEDDED, PLAIN, MADE = "embedded", "by reference", "made by recipe"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Milliseconds of a batch by kind of row, one list entry a round."""

    milliseconds: dict[str, list[float]]

    def ratio(self, one: str, other: str) -> float:
        """Median over the rounds of the time of one kind over that of another."""
        pairs = zip(self.milliseconds[one], self.milliseconds[other], strict=True)
        return median(a / b for a, b in pairs)


def open_all(folder: Path, samples: int) -> dict[str, tuple[AnchorSet, Any]]:
    """The anchors of each kind of row, with the numbers of these rows in their cache."""
    demo = CacheConfig(device="cpu")
    teacher = open_policy(demo)
    dataset = open_anchor_data(demo, teacher)
    settings: dict[str, dict[str, Any]] = {
        EMBEDDED: {"images": Images.EMBED},
        PLAIN: {},
        MADE: {"augment": 1},
    }
    found = {}
    for name, changes in settings.items():
        output = folder / f"{name.replace(' ', '-')}.zarr"
        config = CacheConfig(device="cpu", samples=samples, output=output, **changes)
        build_cache(config, teacher, dataset, on_plan=lambda _: None, on_rows=lambda _: None)
        opened = open_anchors(CacheReader.open(output), teacher, kinds=[Kind.HIDDEN, Kind.ACTION])
        # The first rows of a cache with made ones are frames.
        rows = np.arange(samples) + (samples if name == MADE else 0)
        found[name] = opened.anchors, rows
    return found


def measure(folder: Path, *, samples: int, batch_size: int, rounds: int) -> Measured:
    """Time a random batch of each kind, alternating."""
    kinds = open_all(folder, samples)
    rng = np.random.default_rng(0)
    device = torch.device("cpu")
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for anchors, rows in kinds.values():
        # Once over all rows: reads every frame of the dataset into memory.
        anchors.read(rows, device)
    for _ in range(rounds):
        chosen = rng.integers(samples, size=batch_size)
        for name, (anchors, rows) in kinds.items():
            begin = time.perf_counter()
            anchors.read(rows[chosen], device)
            found[name].append((time.perf_counter() - begin) * 1e3)
    return Measured(milliseconds=found)


def rows(*, quick: bool) -> list[Row]:
    """A batch of made rows over one of plain rows."""
    sizes = (
        {"samples": 8, "batch_size": 4, "rounds": 2}
        if quick
        else {"samples": 64, "batch_size": 16, "rounds": 15}
    )
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch), **sizes).milliseconds
    ratios = [made / plain for made, plain in zip(found[MADE], found[PLAIN], strict=True)]
    return [row_of("made: a batch made by recipe / of plain rows", "wall clock", ratios)]


def main(samples: int = 64, batch_size: int = 16, rounds: int = 15) -> None:
    """Print milliseconds for a batch of each kind, and their ratios."""
    with tempfile.TemporaryDirectory() as scratch:
        measured = measure(Path(scratch), samples=samples, batch_size=batch_size, rounds=rounds)
    print(f"{date.today()}, {os.cpu_count()} cores, batches of {batch_size} rows with one image")
    for name, times in measured.milliseconds.items():
        print(f"{name:15} {median(times):7.2f} ms a batch")
    print(f"made by recipe over plain by reference: {measured.ratio(MADE, PLAIN):.1f}x")
    print(f"made by recipe over embedded: {measured.ratio(MADE, EMBEDDED):.1f}x")


if __name__ == "__main__":
    typer.run(main)
