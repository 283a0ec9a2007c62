"""Rows that are a pure function of a seed, and how they get into a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.dtypes import encode
from craftcli.cache.format import Manifest
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.writing.writer import CacheWriter

Rows = dict[str, NDArray[Any]]


def random_rows(manifest: Manifest, arrays: Mapping[str, ArraySpec], seed: int = 0) -> Rows:
    """All rows of a cache: hidden states of any size, zeros and ones elsewhere.

    Every other row of a packed array is empty.
    """
    rng = np.random.default_rng(seed)
    rows: Rows = {}
    for name, spec in arrays.items():
        shape = (manifest.rows, *spec.shape)
        if name.startswith("hidden/"):
            rows[name] = encode(rng.normal(size=shape).astype(np.float32), manifest.dtype)
        else:
            rows[name] = rng.integers(0, 2, shape).astype(spec.dtype)
        if name in (manifest.packed or ()):
            rows[name][::2] = 0
    return rows


def rows_of_chunk(manifest: Manifest, arrays: Mapping[str, ArraySpec], chunk: int) -> Rows:
    """The rows of one chunk alone, by its number; every other one of a packed array is empty."""
    where = manifest.chunk_rows(chunk)
    rng = np.random.default_rng(chunk)
    rows = {
        name: rng.integers(0, 2, (where.stop - where.start, *spec.shape)).astype(spec.dtype)
        for name, spec in arrays.items()
    }
    for name in manifest.packed or ():
        rows[name][::2] = 0
    return rows


def write_rows(
    path: Path,
    manifest: Manifest,
    arrays: Mapping[str, ArraySpec],
    rows: Rows,
    *,
    tasks: Sequence[str],
    overwrite: bool = False,
) -> None:
    """Write a whole cache, the last chunk first: no order is asked for."""
    with CacheWriter.create(path, manifest, arrays, tasks=tasks, overwrite=overwrite) as writer:
        for chunk in reversed(range(manifest.chunk_count)):
            where = manifest.chunk_rows(chunk)
            writer.write_chunk(chunk, {name: values[where] for name, values in rows.items()})
        writer.finish()
