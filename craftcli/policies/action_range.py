"""Actions that a policy cannot take: those beyond where it cuts its predictions off.

The normaliser stays the teacher's, and diffusion policies cut off at what it calls ±1. A new task
that needs more than the old ones did is then learned to a small loss and never carried out: in
Meta-World, a policy that had never pulled (pick-place) opened no door in 50 episodes.
"""

from typing import Any

import numpy as np
import torch
from lerobot.utils.constants import ACTION
from numpy.typing import NDArray

from craftcli.policies.loading import Checkpoint

MARGIN = 0.02
"""How far out, in half ranges, an action may lie that is still carried out almost as it is."""


def describe_cut_off(policy: Checkpoint, dataset: Any) -> str | None:
    """How many of the dataset's actions the policy would cut off, and what helps; None if none."""
    bound = policy.adapter.action_bound(policy.policy)
    if bound is None:
        return None
    actions = _actions(dataset)
    low, high = _reach(policy, bound, actions.shape[1])
    # In half ranges from their middle: the policy cuts off at 1.
    distance = np.abs(2 * actions - low - high) / np.maximum(high - low, 1e-6)
    share = (distance > 1 + MARGIN).any(axis=1).mean()
    if share == 0:
        return None
    furthest = int(distance.max(axis=0).argmax())
    needed = np.ceil(10 * bound * distance.max()) / 10
    return (
        f"{share:.1%} of the actions to be learned are out of the policy's reach: in action "
        f"{furthest} it cuts off at {low[furthest]:.3g} and {high[furthest]:.3g}, and the data go "
        f"from {actions[:, furthest].min():.3g} to {actions[:, furthest].max():.3g}. "
        f"Set clip_sample_range in the checkpoint's config.json to {needed:g} before building the "
        "cache."
    )


def _actions(dataset: Any) -> NDArray[Any]:
    column = dataset.hf_dataset.data.column(ACTION)
    values = np.stack(column.to_numpy()).astype(np.float64)
    return values.reshape(len(values), -1)


def _reach(policy: Checkpoint, bound: float, size: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The least and the greatest action, in the units of the data."""
    edges = torch.tensor([[-bound], [bound]]).repeat(1, size)
    low, high = policy.postprocess(edges).to(torch.float64).cpu().numpy()
    return low, high
