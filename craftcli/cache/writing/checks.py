"""Checks before anything is written: arrays that fit the manifest, rows that fit the arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from craftcli.cache.dtypes import is_finite
from craftcli.cache.format import Manifest, layer_names
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.zarr_layout import required_arrays
from craftcli.errors import CraftError


def check_arrays(manifest: Manifest, arrays: Mapping[str, ArraySpec]) -> None:
    """Raise a ValueError unless all arrays of the manifest are there, and no reserved names."""
    required = required_arrays(manifest)
    problems = [
        f"{name} must be {spec}, got {arrays.get(name)}"
        for name, spec in required.items()
        if arrays.get(name) != spec
    ]
    problems += [
        f"{name} is packed and must have two axes or more in a row, got {arrays.get(name)}"
        for name in manifest.packed or ()
        if name not in arrays or len(arrays[name].shape) < 2
    ]
    for name in arrays:
        if name == "commit" or name.startswith("stats/"):
            problems.append(f"{name} is a name craft writes itself")
        if name not in required and name.startswith(("hidden", "index/")):
            problems.append(f"{name} is not in the manifest")
        if any(part in ("", ".", "..") for part in name.split("/")):
            problems.append(f"{name!r} is no array name")
    if problems:
        raise ValueError("; ".join(problems))


def check_layout(
    arrays: Mapping[str, ArraySpec], count: int, tasks: int, rows: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Raise a ValueError unless these are `count` rows of the arrays with a valid task number."""
    if rows.keys() != arrays.keys():
        wrong = sorted(rows.keys() ^ arrays.keys())
        raise ValueError(f"arrays missing or unknown: {', '.join(wrong)}")
    for name, spec in arrays.items():
        shape = (count, *spec.shape)
        if rows[name].shape != shape or rows[name].dtype != np.dtype(spec.dtype):
            got = f"{rows[name].dtype} {rows[name].shape}"
            raise ValueError(f"{name} must be {spec.dtype} {shape}, got {got}")
    valid = rows["index/task"][rows["valid"]]
    if ((valid < 0) | (valid >= tasks)).any():
        raise ValueError(f"index/task goes beyond the {tasks} tasks")


def check_finite(manifest: Manifest, start: int, rows: Mapping[str, npt.NDArray[Any]]) -> None:
    """Refuse NaN and infinity in hidden states that would be trained on.

    `start` is the number of the first row.

    Raises:
        CraftError: names the first such row and its layer.
    """
    if "hidden" not in manifest.kinds:
        return
    targets = rows["hidden_mask"] & rows["valid"][:, None]
    for layer in layer_names(manifest):
        finite = is_finite(rows[f"hidden/{layer}"], manifest.dtype).all(axis=2)
        bad = np.flatnonzero((targets & ~finite).any(axis=1))
        if bad.size:
            raise CraftError(
                "The teacher's hidden states are not finite.",
                why=f"row {start + bad[0]} of layer {layer} has NaN or infinity.",
                fix="run the teacher in a wider dtype, or leave such samples out.",
            )
