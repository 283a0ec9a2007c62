"""Model inputs as stored arrays: images of the dataset as bytes, everything else unchanged."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from craftcli.errors import CraftError

UINT8_IMAGE = {"craft_scale": "1/255"}
"""Attribute of an input array: its uint8 values stand for float32 in [0, 1]."""


def fits_bytes(value: torch.Tensor) -> bool:
    """Whether a tensor is bytes divided by 255, as the images of a dataset are.

    Normalised images are not, and are stored unchanged.
    """
    return value.dtype == torch.float32 and torch.equal(_fraction(_bytes(value)), value)


def pack(value: torch.Tensor, *, as_bytes: bool) -> NDArray[Any]:
    """The array to store for a model input; `unpack` restores every bit."""
    value = value.detach().cpu()
    if as_bytes:
        if not fits_bytes(value):
            raise CraftError(
                "An image cannot be stored as bytes.",
                why="the first anchor's image was bytes divided by 255, and this one is not.",
                fix="check the dataset for images of mixed origin.",
            )
        return _bytes(value).numpy()
    if value.dtype == torch.bfloat16:
        value = value.float()  # exact, and numpy has no bfloat16
    return value.numpy()


def unpack(values: NDArray[Any], attributes: dict[str, Any]) -> torch.Tensor:
    """The model input that `pack` stored."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return _fraction(tensor) if attributes == UINT8_IMAGE else tensor


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return (value * 255).round().clamp(0, 255).to(torch.uint8)


def _fraction(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float32) / 255
