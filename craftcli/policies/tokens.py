"""Token masks of stacks that carry a single kind of token: actions, or one condition vector."""

import torch
from torch import Tensor

from craftcli.policies.base import Batch
from craftcli.policies.pooling import TokenMasks

ACTION_IS_PAD = "action_is_pad"
"""LeRobot's batch entry [B, chunk] that is True for actions beyond the end of an episode."""


def counted_actions(batch: Batch, length: int, *, of: Tensor, padding: bool = True) -> Tensor:
    """[B, length] bool: the actions that count.

    All count if `padding` is False or the batch has no padding mask. `of` is any tensor with the
    same rows on the same device.
    """
    if padding and ACTION_IS_PAD in batch:
        padded: Tensor = batch[ACTION_IS_PAD]
        return ~padded
    return torch.ones(len(of), length, dtype=torch.bool, device=of.device)


def nothing_padded(actions: Tensor) -> Tensor:
    """[B, chunk], all False: a chunk that the policy itself predicts has no padding."""
    return torch.zeros(actions.shape[:2], dtype=torch.bool, device=actions.device)


def action_masks(counted: Tensor) -> TokenMasks:
    """Masks of a stack in which every token is a step of the action chunk; `counted` [B, S]."""
    nothing = torch.zeros_like(counted)
    return TokenMasks(
        image=nothing, text=nothing, action=counted, action_span=(0, counted.shape[1])
    )


def condition_masks(condition: Tensor) -> TokenMasks:
    """Masks of a single token that holds the whole observation; it counts as text."""
    one = torch.ones(len(condition), 1, dtype=torch.bool, device=condition.device)
    return TokenMasks(image=~one, text=one, action=~one)
