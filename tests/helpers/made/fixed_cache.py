"""The cache under `tests/cache/fixtures`: rows by a formula, so that no library can change them.

It was written by craft 0.1.0 as of commit c3ca4d5, with the old names of the modules imported here,
by `write(path, manifest(), rows())`.
"""

import numpy as np

from craftcli.cache.dtypes import encode
from craftcli.cache.format import Manifest
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.zarr_layout import required_arrays
from made.manifests import make_manifest
from made.rows import Rows

TASKS = ["push the cube", "öffne die Tür"]
EXTRA = {
    "inputs/observation.images.top": ArraySpec(
        shape=(3, 2, 2), dtype="uint8", attributes={"craft_scale": "1/255"}
    ),
    "inputs/with/slash": ArraySpec(shape=(), dtype="float64"),
    "outputs/labels": ArraySpec(shape=(5,), dtype="int64"),
    "outputs/mask": ArraySpec(shape=(5,), dtype="bool"),
    "outputs/prediction": ArraySpec(shape=(5, 2), dtype="float32"),
}


def fixed_manifest() -> Manifest:
    """All kinds, two layers in bfloat16, three chunks with the last one not full."""
    return make_manifest(
        format_version="1.1",
        kinds=("hidden", "token_ce", "action"),
        dtype="bfloat16",
        actions="teacher",
        versions={"craftcli": "0.1.0"},
    )


def fixed_arrays() -> dict[str, ArraySpec]:
    """The arrays of the cache."""
    return required_arrays(fixed_manifest()) | EXTRA


def fixed_rows() -> Rows:
    """Its rows: small fractions of a power of two, which every dtype holds exactly."""
    manifest, rows = fixed_manifest(), {}
    for number, (name, spec) in enumerate(fixed_arrays().items()):
        shape = (manifest.rows, *spec.shape)
        steps = (np.arange(np.prod(shape)).reshape(shape) * (37 + 2 * number)) % 251
        if name.startswith("hidden/"):
            rows[name] = encode(((steps - 125) / 16).astype(np.float32), manifest.dtype)
        elif spec.dtype == "bool":
            rows[name] = steps % 5 > 0
        elif spec.dtype.startswith("float"):
            rows[name] = ((steps - 125) / 8).astype(spec.dtype)
        else:
            rows[name] = (steps % 2 if name == "index/task" else steps).astype(spec.dtype)
    rows["outputs/labels"][:, -1] = -100
    return rows
