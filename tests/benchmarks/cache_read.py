"""Reading random rows: craft's cache against other ways to keep them, ratios in one run.

    uv run python tests/benchmarks/cache_read.py

For a random batch of 16, and for the first shuffled epoch, in which craft checks every chunk: when
the files come from disk, and when they are still in the system's page cache. A memmap, which checks
nothing, is the yardstick. Opening, which does not depend on the number of rows, is timed apart.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ways
from synthetic import Values, activations, drop_page_cache, median_s, print_machine, size_on_disk
from table import Row

BATCH = 16
Opener = Callable[[], ways.Read]


def write_all(folder: Path, hidden: Values) -> dict[str, Opener]:
    """Write the rows in every way; how to open each for reading."""
    memmap, shards, tensors, craft = (
        folder / name for name in ("memmap.bin", "shards", "rows.safetensors", "anchors.zarr")
    )
    ways.write_memmap(memmap, hidden)
    ways.write_shards(shards, hidden)
    ways.write_safetensors(tensors, hidden)
    ways.write_craft(craft, hidden)
    return {
        "numpy memmap": lambda: ways.read_memmap(memmap, hidden),
        "craft, ram": lambda: ways.read_craft(craft, "ram"),
        "craft, mmap": lambda: ways.read_craft(craft, "mmap"),
        "safetensors": lambda: ways.read_safetensors(tensors, hidden),
        "zarr API": lambda: ways.read_craft_by_zarr(craft, hidden),
        ".pt shards": lambda: ways.read_shards(shards, hidden),
    }


def check(hidden: Values, openers: dict[str, Opener]) -> None:
    """Every way gives the same rows."""
    rows = np.array([5, 0, len(hidden) - 1])
    for name, opener in openers.items():
        got = opener()(rows)
        stacked = np.stack(got, axis=1) if isinstance(got, list) else np.asarray(got)
        assert (stacked == hidden[rows]).all(), name


def batch_s(openers: dict[str, Opener], count: int, repeats: int, slow: int) -> dict[str, float]:
    """Seconds of a random batch, warm: all files were read before."""
    rng = np.random.default_rng(1)
    readers = {name: opener() for name, opener in openers.items()}
    order = rng.permutation(count)
    for name in ("numpy memmap", "craft, ram", "craft, mmap", "safetensors"):
        readers[name](order)

    def one(name: str) -> Callable[[], object]:
        return lambda: readers[name](rng.integers(0, count, BATCH))

    fast = [name for name in readers if name not in ("zarr API", ".pt shards")]
    times = median_s({name: one(name) for name in fast}, repeats)
    return times | median_s({name: one(name) for name in readers if name not in fast}, slow)


def epoch_s(
    folder: Path, openers: dict[str, Opener], count: int, *, cold: bool, repeats: int
) -> dict[str, float]:
    """Seconds to read every row once in random order."""
    batches = np.array_split(np.random.default_rng(2).permutation(count), -(-count // BATCH))
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name in ("numpy memmap", "craft, ram", "craft, mmap", "safetensors"):
            if cold:
                drop_page_cache(folder)

            read = openers[name]()
            started = time.perf_counter()
            for rows in batches:
                read(rows)
            times.setdefault(name, []).append(time.perf_counter() - started)
    return {name: float(np.median(taken)) for name, taken in times.items()}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of every way by what was read, and bytes on disk over raw bytes."""

    batch: dict[str, float]
    cold: dict[str, float]
    """The first epoch, from disk."""
    warm: dict[str, float]
    """The first epoch, from the page cache."""
    sizes: dict[str, float]
    opened: float


def measure(hidden: Values, repeats: int, slow: int, *, epochs: int = 7) -> Measured:
    """Measure one kind of rows in every way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        openers = write_all(folder, hidden)
        check(hidden, openers)
        batch = batch_s(openers, len(hidden), repeats, slow)
        cold = epoch_s(folder, openers, len(hidden), cold=True, repeats=epochs)
        warm = epoch_s(folder, openers, len(hidden), cold=False, repeats=epochs)
        files = {"numpy memmap": "memmap.bin", "safetensors": "rows.safetensors"}
        files |= {".pt shards": "shards", "craft, ram": "anchors.zarr"}
        opened = median_s({"craft": openers["craft, ram"]}, 5)["craft"]
        sizes = {way: size_on_disk(folder / file) / hidden.nbytes for way, file in files.items()}
    return Measured(batch=batch, cold=cold, warm=warm, sizes=sizes, opened=opened)


def rows(*, quick: bool) -> list[Row]:
    """Craft's cache over a memmap, for pooled rows."""
    hidden = activations(200 if quick else 4000, 2, 64 if quick else 2048)
    found = measure(hidden, 20 if quick else 1000, 2, epochs=1 if quick else 7)
    memmap = "numpy memmap"
    ratios = {
        f"read: a random batch of {BATCH}": found.batch,
        "read: the first epoch from disk": found.cold,
        "read: the first epoch from the page cache": found.warm,
    }
    return [
        *(
            Row(
                compared=f"{what}, {way} / {memmap}",
                measure="wall clock",
                ratio=seconds[way] / seconds[memmap],
            )
            for what, seconds in ratios.items()
            for way in ("craft, ram", "craft, mmap")
        ),
        Row(
            compared="read: craft's cache on disk / its raw bytes",
            measure="bytes",
            ratio=found.sizes["craft, ram"],
        ),
    ]


def report(title: str, hidden: Values, repeats: int, slow: int) -> None:
    """Measure one kind of rows and print its table."""
    found = measure(hidden, repeats, slow)
    batch, cold, warm, sizes, opened = (
        found.batch,
        found.cold,
        found.warm,
        found.sizes,
        found.opened,
    )
    print(f"\n{title}, {len(hidden)} rows, {hidden.nbytes / 1e6:.0f} MB")
    print(
        f"{'':14}{'batch of 16':>13}{'of memmap':>11}{'.pt / this':>12}"
        f"{'epoch, disk':>13}{'epoch, cache':>14}{'size':>8}"
    )
    base, shards = batch["numpy memmap"], batch[".pt shards"]
    for way, seconds in batch.items():
        line = (
            f"{way:14}{seconds * 1e6:>10.0f} µs{seconds / base:>10.2f}x{shards / seconds:>11.0f}x"
        )
        if way in cold:
            line += f"{cold['numpy memmap'] / cold[way]:>12.2f}x"
            line += f"{warm['numpy memmap'] / warm[way]:>13.2f}x"
        else:
            line += " " * 27
        print(line + (f"{sizes[way]:>8.3f}" if way in sizes else ""))
    print(
        f"memmap's first epoch: {cold['numpy memmap'] * 1e3:.0f} ms from disk, "
        f"{warm['numpy memmap'] * 1e3:.0f} ms from the page cache; "
        f"opening craft's cache takes {opened * 1e3:.0f} ms"
    )


def main() -> None:
    """Measure pooled and per-token rows."""
    print_machine()
    print("epoch: speed relative to memmap; size: bytes on disk over raw bytes")
    report("Pooled rows [2, 2, 2048] float16", activations(4000, 2, 2048), 1000, 15)
    report("Per-token rows [2, 64, 2048] float16", activations(384, 64, 2048), 60, 5)


if __name__ == "__main__":
    main()
