"""Kinds of token of policies whose stacks carry one kind each: actions, or one condition."""

import torch
from torch import Tensor

from craftcli.cache.pooling import TokenMasks
from craftcli.policies.base import Batch

ACTION_IS_PAD = "action_is_pad"
"""LeRobot's batch entry [B, chunk] that marks actions beyond the end of an episode."""


def counted_actions(batch: Batch, length: int, *, of: Tensor, padding: bool = True) -> Tensor:
    """[B, length] bool: the actions that count; all without `padding` or where none is known.

    `of` is a tensor with the same rows, on the device that is wanted.
    """
    if padding and ACTION_IS_PAD in batch:
        padded: Tensor = batch[ACTION_IS_PAD]
        return ~padded
    return torch.ones(len(of), length, dtype=torch.bool, device=of.device)


def nothing_padded(actions: Tensor) -> Tensor:
    """[B, chunk] bool of False: a chunk that the policy itself predicts is whole."""
    return torch.zeros(actions.shape[:2], dtype=torch.bool, device=actions.device)


def action_masks(counted: Tensor) -> TokenMasks:
    """Every token stands for a step of the action chunk; those count that `counted` names."""
    nothing = torch.zeros_like(counted)
    return TokenMasks(
        image=nothing, text=nothing, action=counted, action_span=(0, counted.shape[1])
    )


def condition_masks(condition: Tensor) -> TokenMasks:
    """One token that holds all of an observation: neither image nor action, so it is text."""
    one = torch.ones(len(condition), 1, dtype=torch.bool, device=condition.device)
    return TokenMasks(image=~one, text=one, action=~one)
