"""Flipped bits: every one in the payload of a cache must be found, and no row read over it.

    uv run python tests/benchmarks/flips.py

Flips single bits of a small cache, one at a time: first anywhere in its payload (rows, commit
records, statistics), then anywhere in its metadata. Each flip must be reported by `verify`, and a
reader must refuse the rows of that chunk, whichever way it reads. Metadata is JSON without a
checksum: a flip there is refused, or changes nothing that was written, or is counted as silent.
"""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from synthetic import LAYERS, Values, activations, write_cache

from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.zarr_layout import OpenedCache, open_cache
from craftcli.errors import CraftError

FLIPS = 1000
Contents = dict[str, Any]


def make_cache(path: Path, *, packed: bool = False) -> None:
    """A cache with every kind of array, three chunks and a padded end, half of it empty slots."""
    rng = np.random.default_rng(0)
    inputs: dict[str, Values] = {
        "inputs/image": rng.integers(0, 256, (20, 3, 4, 4), np.uint8),
        "inputs/tokens": rng.integers(0, 1000, (20, 6)),
        "inputs/mask": rng.random((20, 6)) < 0.5,
    }
    # Of the hidden states a chunk is one page, so that they are mapped side by side.
    hidden = activations(20, 2, 128)
    hidden[::2] = 0
    write_cache(path, hidden, inputs, chunk=8, packed=packed)


def payload_files(path: Path) -> list[Path]:
    """Chunk files of all arrays."""
    files = (file for file in path.rglob("*") if file.is_file())
    return sorted(file for file in files if file.name != "zarr.json")


def metadata_files(path: Path) -> list[Path]:
    """Metadata of the group and of all arrays."""
    return sorted(path.rglob("zarr.json"))


def random_bits(files: list[Path], count: int) -> Iterator[tuple[Path, int]]:
    """Bits of the files: one over all bytes, the next over all files, so that none is too small."""
    rng = np.random.default_rng(1)
    sizes = np.array([file.stat().st_size for file in files])
    for number in range(count):
        which = int(rng.choice(len(files), p=sizes / sizes.sum() if number % 2 else None))
        yield files[which], int(rng.integers(sizes[which] * 8))


@contextlib.contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """The file with one bit changed, as it was afterwards."""
    before = file.read_bytes()
    changed = bytearray(before)
    changed[bit // 8] ^= 1 << bit % 8
    file.write_bytes(changed)
    try:
        yield
    finally:
        file.write_bytes(before)


def is_refused(path: Path, opened: OpenedCache, file: Path, memory: str) -> bool:
    """Whether new readers raise before they give anything that the flip may have harmed."""
    name, _, key = str(file.relative_to(path)).partition("/c/")
    if name.startswith("stats/"):
        layer = name.split("/")[1]
        return _raises(CacheReader(path, opened, memory=memory).stats, layer)
    last = opened.manifest.chunk_rows(int(key.split("/")[0])).stop - 1
    # A commit record stands for the rows of all arrays.
    return all(
        _raises(CacheReader(path, opened, memory=memory).read, array, np.array([last]))
        for array in (opened.specs if name == "commit" else [name])
    )


def count_missed(path: Path, count: int) -> Counter[str]:
    """Flip bits of the payload; how many `verify` or a reader did not notice."""
    missed = Counter({"verify": 0, "ram": 0, "mmap": 0})
    opened = open_cache(path)
    for file, bit in random_bits(payload_files(path), count):
        with flipped(file, bit):
            missed["verify"] += not CacheReader(path, opened).verify()
            for memory in ("ram", "mmap"):
                missed[memory] += not is_refused(path, opened, file, memory)
    return missed


def contents(path: Path) -> Contents:
    """All that a training takes from a cache, whatever its manifest says of the origin."""
    reader = CacheReader.open(path)
    found: Contents = {name: reader.read_all(name) for name in reader.array_names()}
    for layer in LAYERS:
        stats = reader.stats(f"vlm.{layer}")
        found |= {f"mean.{layer}": stats.mean, f"variance.{layer}": stats.variance}
    return found | {"tasks": reader.tasks, "manifest": reader.manifest}


def judge_metadata(path: Path, count: int) -> Counter[str]:
    """Flip bits of the metadata; what became of the cache."""
    before = contents(path)
    outcomes = Counter({"refused": 0, "no effect": 0, "other rows": 0})
    for file, bit in random_bits(metadata_files(path), count):
        with flipped(file, bit):
            try:
                after = contents(path)
            except CraftError:
                outcomes["refused"] += 1
                continue
        changed = [name for name, values in before.items() if not _same(values, after.get(name))]
        if not changed:
            outcomes["no effect"] += 1
        elif set(changed) <= {"tasks", "manifest"}:
            outcomes[f"other {' and '.join(changed)}"] += 1
        else:
            outcomes["other rows"] += 1
    return outcomes


def _raises(action: Callable[..., Any], *arguments: Any) -> bool:
    try:
        action(*arguments)
    except CraftError:
        return True
    return False


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    return bool(one == other)


def main() -> None:
    """Flip and print."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "anchors.zarr"
        make_cache(path)
        missed = count_missed(path, FLIPS)
        print(
            f"{FLIPS} flips in the payload, missed by verify: {missed['verify']}, "
            f"missed by read: {missed['ram']} (ram), {missed['mmap']} (mmap)"
        )
        outcomes = judge_metadata(path, FLIPS)
        print(
            f"{FLIPS} flips in the metadata: "
            + ", ".join(f"{name}: {count}" for name, count in outcomes.items())
        )


if __name__ == "__main__":
    main()
