"""Writing rows: craft's cache against other ways to keep them, ratios in one run.

    uv run python tests/benchmarks/cache_write.py

Every way ends with its files on disk (fsync). Only craft's also has checksums, commit records, a
check for numbers that are not finite, and statistics of what was written, which it reads back.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ways
from synthetic import Values, activations, print_machine, size_on_disk

WAYS: dict[str, Callable[[Path, Values], None]] = {
    "numpy memmap": ways.write_memmap,
    "numpy save": lambda path, hidden: np.save(path.with_suffix(".npy"), hidden),
    "craft": ways.write_craft,
    "safetensors": ways.write_safetensors,
    "zarr API": ways.write_zarr,
    ".pt shards": ways.write_shards,
}


def write_s(way: Callable[[Path, Values], None], hidden: Values) -> tuple[float, int]:
    """Seconds to write the rows to disk, and the bytes they take there."""
    folder = Path(tempfile.mkdtemp())
    try:
        started = time.perf_counter()
        way(folder / "rows", hidden)
        for file in (file for file in folder.rglob("*") if file.is_file()):
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        return time.perf_counter() - started, size_on_disk(folder)
    finally:
        shutil.rmtree(folder)


def report(title: str, hidden: Values, repeats: int) -> None:
    """Measure one kind of rows, the ways in turn, and print its table."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    sizes: dict[str, int] = {}
    for _ in range(repeats):
        for name, way in WAYS.items():
            taken, sizes[name] = write_s(way, hidden)
            times[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    print(f"\n{title}, {len(hidden)} rows, {hidden.nbytes / 1e6:.0f} MB")
    print(f"{'':14}{'MB/s':>8}{'of memmap':>11}{'size':>8}")
    for name, taken in medians.items():
        speed = hidden.nbytes / 1e6 / taken
        ratio = medians["numpy memmap"] / taken
        print(f"{name:14}{speed:>8.0f}{ratio:>10.2f}x{sizes[name] / hidden.nbytes:>8.3f}")


def main() -> None:
    """Measure pooled and per-token rows."""
    print_machine()
    print("of memmap: speed relative to it; size: bytes on disk over raw bytes")
    report("Pooled rows [2, 2, 2048] float16", activations(4000, 2, 2048), 5)
    report("Per-token rows [2, 64, 2048] float16", activations(384, 64, 2048), 3)


if __name__ == "__main__":
    main()
