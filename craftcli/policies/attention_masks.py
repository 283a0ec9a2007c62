"""Attention masks of the policies that descend from openpi, as LeRobot computes them.

LeRobot 0.6.0 and 0.6.1 have these two functions in different places, one of them inside a class.
"""

import torch
from lerobot.utils.constants import OPENPI_ATTENTION_MASK_VALUE
from torch import Tensor


def block_attention(pad_mask: Tensor, starts: Tensor) -> Tensor:
    """Which token sees which: [B, S, S], all of its own block and of those before it.

    Args:
        pad_mask: [B, S], False for padding, which neither sees nor is seen.
        starts: [B, S], 1 where a new block starts.
    """
    block = torch.cumsum(starts, dim=1)
    seen = block[:, None, :] <= block[:, :, None]
    return seen & (pad_mask[:, None, :] * pad_mask[:, :, None])


def additive(attention: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A mask to add to attention scores: [B, 1, S, S], 0 where a token is seen."""
    mask = torch.where(attention[:, None, :, :], 0.0, OPENPI_ATTENTION_MASK_VALUE)
    return mask if dtype is None else mask.to(dtype)
