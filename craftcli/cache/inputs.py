"""Model inputs as stored arrays: images as uint8 where that loses nothing, the rest as it is."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

UINT8_IMAGE = {"craft_scale": "1/255"}
"""Attribute of an input array whose uint8 values stand for float32 in [0, 1]."""


def pack(value: torch.Tensor, *, image: bool) -> NDArray[Any]:
    """The array to store for a model input.

    Dataset images are bytes divided by 255; they are stored as these bytes when multiplying back
    gives every bit of the input. What a normaliser has changed is stored as it is.
    """
    value = value.detach().cpu()
    if image and value.dtype == torch.float32:
        as_bytes = (value * 255).round().clamp(0, 255).to(torch.uint8)
        if torch.equal(as_bytes.to(torch.float32) / 255, value):
            return as_bytes.numpy()
    if value.dtype == torch.bfloat16:
        value = value.float()  # exact, and numpy has no bfloat16
    return value.numpy()


def unpack(values: NDArray[Any], attributes: dict[str, Any]) -> torch.Tensor:
    """The model input that `pack` stored."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if attributes == UINT8_IMAGE:
        return tensor.to(torch.float32) / 255
    return tensor
