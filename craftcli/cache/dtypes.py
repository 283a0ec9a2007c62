"""Converts hidden states between float32 and the dtypes in which they are stored.

Neither numpy nor Zarr has bfloat16: it is kept as the upper 16 bits of a float32, in uint16.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from craftcli.cache.format import DTYPES
from craftcli.errors import CraftError

_STORAGE = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}
_WIDER = {"float16": "--dtype float32 or --dtype bfloat16", "bfloat16": "--dtype float32"}


def storage_dtype(dtype: str) -> str:
    """The numpy dtype that holds `dtype` on disk.

    >>> storage_dtype("bfloat16")
    'uint16'
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return _STORAGE[dtype]


def encode(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Round float32 to the nearest value of `dtype`, ties to even; NaN and infinity are kept.

    Raises:
        CraftError: a finite value is too large for `dtype`.
    """
    stored = storage_dtype(dtype)
    values = np.asarray(values, dtype=np.float32)
    if dtype == "float32":
        return values
    if dtype == "float16":
        # The overflow is reported below, with a fix.
        with np.errstate(over="ignore"):
            encoded: npt.NDArray[Any] = values.astype(stored)
    else:
        encoded = _to_bfloat16(values)
    overflow = np.isfinite(values) & ~is_finite(encoded, dtype)
    if overflow.any():
        largest = float(np.abs(values[overflow]).max())
        raise CraftError(
            f"Hidden states do not fit into {dtype}.",
            why=f"{int(overflow.sum())} values overflow, the largest is {largest:.4g}.",
            fix=f"store them wider with {_WIDER[dtype]}.",
        )
    return encoded


def decode(values: npt.NDArray[Any], craft_dtype: str) -> npt.NDArray[np.float32]:
    """Stored hidden states as float32, exactly."""
    _check_storage(values, craft_dtype)
    if craft_dtype != "bfloat16":
        return values.astype(np.float32)
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def is_finite(values: npt.NDArray[Any], craft_dtype: str) -> npt.NDArray[np.bool_]:
    """Where stored hidden states are neither NaN nor infinite."""
    _check_storage(values, craft_dtype)
    if craft_dtype != "bfloat16":
        return np.asarray(np.isfinite(values))
    exponent = np.uint16(0x7F80)
    return np.asarray((values & exponent) != exponent)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    upper = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    # Rounding could turn a NaN into infinity, and truncating it could clear its mantissa.
    quiet_nan = upper | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def _check_storage(values: npt.NDArray[Any], craft_dtype: str) -> None:
    if values.dtype != np.dtype(storage_dtype(craft_dtype)):
        raise ValueError(
            f"{craft_dtype} is stored as {storage_dtype(craft_dtype)}, got {values.dtype}"
        )
