"""A cache of a few rows with inputs of several shapes."""

from pathlib import Path

import numpy as np

from craftcli.cache.format import Manifest
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.zarr_layout import required_arrays
from made.rows import Rows, random_rows, write_rows

TASKS = ["push the cube", "öffne die Tür"]
INPUTS = {
    "inputs/observation.images.top": ArraySpec(shape=(3, 2, 2), dtype="uint8"),
    "inputs/action.tokens": ArraySpec(shape=(5,), dtype="int32"),
    "inputs/with/slash": ArraySpec(shape=(), dtype="float64"),
}


def make_arrays(manifest: Manifest) -> dict[str, ArraySpec]:
    return required_arrays(manifest) | INPUTS


def make_rows(manifest: Manifest, seed: int = 0) -> Rows:
    rows = random_rows(manifest, make_arrays(manifest), seed)
    rows["index/dataset_index"] = np.arange(manifest.rows) * 7
    return rows


def write(path: Path, manifest: Manifest, rows: Rows, *, overwrite: bool = False) -> None:
    write_rows(path, manifest, make_arrays(manifest), rows, tasks=TASKS, overwrite=overwrite)
