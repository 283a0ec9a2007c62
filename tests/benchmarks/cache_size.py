"""Size of a cache of a pi0_fast of real size, and the time to read it: empty slots stored or not.

    uv run python tests/benchmarks/cache_size.py

Rows as `craft cache build` stores them by default: two layers [256, 2048] in bfloat16 and the 32
most likely tokens of 255 positions. The numbers of action tokens are those that the FAST paper
(arXiv 2501.09747, table I) reports as means for one second of its datasets, with a spread of a
quarter, and the six tokens that LeRobot puts around them.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from synthetic import LAYERS, Values, median_s, pi0_fast_manifest, print_machine, size_on_disk

from craftcli.cache.build.expected_size import ExpectedSize
from craftcli.cache.dtypes import encode
from craftcli.cache.format import Manifest
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.chunks import ArraySpec, RowArrays
from craftcli.cache.writing.writer import CacheWriter

TOKENS = {"BridgeV2": 20, "DROID": 29, "shirt folding": 53}
AROUND, SLOTS, DIM, TOP_K, BATCH = 6, 256, 2048, 32, 16


def counts(mean: int, rows: int) -> Values:
    """Action tokens of each row."""
    drawn = np.random.default_rng(0).normal(mean, mean / 4, rows)
    return np.clip(np.rint(drawn) + AROUND, 1, SLOTS).astype(np.int64)


def rows_of(filled: Values, seed: int) -> RowArrays:
    """The arrays of rows with that many tokens."""
    rng = np.random.default_rng(seed)
    mask = np.arange(SLOTS) < filled[:, None]
    rows: RowArrays = {"hidden_mask": mask, "valid": np.ones(len(filled), bool)}
    for layer in LAYERS:
        states = np.zeros((len(filled), SLOTS, DIM), np.uint16)
        values = rng.standard_normal((int(filled.sum()), DIM), np.float32)
        states[mask] = encode(values, "bfloat16")
        rows[f"hidden/vlm.{layer}"] = states
    predicted = mask[:, 1:, None]
    shape = (len(filled), SLOTS - 1, TOP_K)
    rows["outputs/top_tokens"] = (rng.integers(1, 257_152, shape) * predicted).astype(np.int32)
    logprobs = rng.standard_normal(shape, np.float32)
    rows["outputs/top_logprobs"] = np.where(predicted, logprobs, np.float32(0))
    rows["outputs/mask"] = mask[:, 1:]
    rows["inputs/action.tokens"] = rng.integers(1, 257_152, mask.shape) * mask
    rows["inputs/action.token_mask"] = mask
    rows["inputs/observation.language.tokens"] = rng.integers(1, 257_152, (len(filled), 200))
    rows |= {f"index/{n}": np.zeros(len(filled), np.int64) for n in ("episode", "frame", "task")}
    rows["index/dataset_index"] = rng.integers(0, 10**6, len(filled))
    return rows


def chunks_of(manifest: Manifest, filled: Values) -> Iterator[RowArrays]:
    """The rows of every chunk, made when they are needed."""
    for chunk in range(manifest.chunk_count):
        yield rows_of(filled[manifest.chunk_rows(chunk)], chunk)


def write(path: Path, manifest: Manifest, filled: Values) -> ExpectedSize:
    """Write a cache; the size that a build would have announced."""
    first = rows_of(filled[:1], 0)
    specs = {
        name: ArraySpec(
            shape=values.shape[1:],
            dtype=str(values.dtype),
            attributes={"craft_dtype": "bfloat16"} if name.startswith("hidden/") else {},
        )
        for name, values in first.items()
    }
    with CacheWriter.create(path, manifest, specs, tasks=["do it"], overwrite=False) as writer:
        for chunk, rows in enumerate(chunks_of(manifest, filled)):
            writer.write_chunk(chunk, rows)
        writer.finish()
    return ExpectedSize.of(manifest, first)


def batch_s(paths: dict[str, Path], rows: int, repeats: int) -> dict[str, float]:
    """Seconds of a random batch of both layers, warm, in every way."""
    rng = np.random.default_rng(1)
    names = [f"hidden/vlm.{layer}" for layer in LAYERS]
    ways = {}
    for kind, path in paths.items():
        for memory in ("mmap", "ram"):
            reader = CacheReader.open(path, memory=memory)
            for name in names:
                reader.read(name, np.arange(rows))

            def read(reader: CacheReader = reader) -> list[Values]:
                return [reader.read(name, rng.integers(0, rows, BATCH)) for name in names]

            ways[f"{kind}, {memory}"] = read
    return median_s(ways, repeats)


def main() -> None:
    """Write caches of every kind of data, and time reading the first of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--read-rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=40)
    asked = parser.parse_args()
    print_machine()
    # Waiting for the disk changes neither sizes nor the time of reading.
    os.fsync = lambda fd: None
    print(f"\n{asked.rows} rows{'':19}{'tokens':>8}{'MB':>8}{'expected':>10}{'stored whole':>14}")
    for name, mean in TOKENS.items():
        manifest = pi0_fast_manifest(asked.rows, SLOTS, DIM)
        filled = counts(mean, asked.rows)
        whole = ExpectedSize.of(replace(manifest, packed=None), rows_of(filled[:1], 0))
        with tempfile.TemporaryDirectory() as folder:
            expected = write(Path(folder) / "a.zarr", manifest, filled)
            size = size_on_disk(Path(folder) / "a.zarr")
        print(
            f"{name:28}{filled.mean():>8.1f}{size / 1e6:>8.0f}"
            f"{expected.total_bytes / 1e6:>10.0f}{whole.total_bytes / 1e6:>14.0f}"
        )
    with tempfile.TemporaryDirectory() as folder:
        paths = {kind: Path(folder) / kind for kind in ("whole", "packed")}
        manifest = pi0_fast_manifest(asked.read_rows, SLOTS, DIM)
        filled = counts(TOKENS["DROID"], asked.read_rows)
        write(paths["packed"], manifest, filled)
        write(paths["whole"], replace(manifest, packed=None), filled)
        times = batch_s(paths, asked.read_rows, asked.repeats)
    print(f"\nrandom batch of {BATCH} rows, DROID, warm")
    for way, seconds in times.items():
        ratio = seconds / times[f"whole, {way.partition(', ')[2]}"]
        print(f"{way:28}{seconds * 1e3:>8.2f} ms{ratio:>8.2f}x of whole rows")


if __name__ == "__main__":
    main()
