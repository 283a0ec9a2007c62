"""Actions that a policy cannot take with the statistics that it has from its teacher.

The normaliser stays the teacher's, and diffusion policies cut off at what it calls ±1. A new task
that needs more than the old ones did is then learned to a small loss and never carried out: in
Meta-World, a policy that had never pulled (pick-place) opened no door in 50 episodes. An action
that stood still in the old data has no scale at all, whatever the policy.
"""

from typing import Any

import numpy as np
import torch
from lerobot.processor import DeviceProcessorStep, UnnormalizerProcessorStep
from lerobot.utils.constants import ACTION
from numpy.typing import NDArray

from craftcli.policies.columns import number_parts
from craftcli.policies.loading import Checkpoint

MARGIN = 0.02
"""How far out, in half ranges, an action may lie that is still carried out almost as it is."""
WORTH_TELLING = 0.005
"""Share of the actions: some frame of a new dataset lies beyond the old ones almost always."""
STILL = 1e-6
"""What counts as no range at all, beside the size of the action itself."""


def describe_out_of_reach(policy: Checkpoint, dataset: Any) -> str | None:
    """Which of the dataset's actions the policy cannot take, and what helps; None if it can."""
    bound = policy.adapter.action_bound(policy.policy)
    actions = _actions(dataset)
    edges = None if actions is None else _edges(policy, bound or 1.0, actions.shape[1])
    if actions is None or edges is None:
        return None
    low, high = edges
    still = high - low <= STILL * (1 + np.abs(low))
    awake = still & (np.abs(actions - low).max(axis=0) > 1e-3)
    if awake.any():
        return _describe_still(int(awake.argmax()), low, actions)
    if bound is None or still.all():
        return None
    # In half ranges from their middle: the policy cuts off at 1.
    width = np.where(still, np.inf, high - low)
    distance = np.abs(2 * actions - low - high) / width
    share = (distance > 1 + MARGIN).any(axis=1).mean()
    if share < WORTH_TELLING:
        return None
    # Some frames may be broken, and the limit is one for all actions.
    furthest = np.quantile(distance, 0.999, axis=0)
    worst = int(furthest.argmax())
    return (
        f"{share:.1%} of the actions to be learned are out of the policy's reach: in action "
        f"{worst} it cuts off at {low[worst]:.3g} and {high[worst]:.3g}, and the data go from "
        f"{actions[:, worst].min():.3g} to {actions[:, worst].max():.3g}. Set clip_sample_range in "
        f"the checkpoint's config.json to {np.ceil(10 * bound * furthest[worst]) / 10:g} before "
        "building the cache."
    )


def _describe_still(number: int, low: NDArray[Any], actions: NDArray[Any]) -> str:
    return (
        f"action {number} stood still at {low[number]:.3g} in the data that the policy's "
        f"normaliser is of, so that it has no scale for the {actions[:, number].min():.3g} to "
        f"{actions[:, number].max():.3g} to be learned. Give the checkpoint's processors "
        "statistics in which it moves before building the cache."
    )


def _actions(dataset: Any) -> NDArray[Any] | None:
    """[frames, numbers], without those that are not finite; None if that leaves nothing."""
    parts = number_parts(dataset.hf_dataset.data.column(ACTION))
    if not parts:
        return None
    actions = np.concatenate([part.reshape(len(part), -1) for part in parts])
    finite: NDArray[Any] = actions[np.isfinite(actions).all(axis=1)]
    return finite if len(finite) else None


def _edges(policy: Checkpoint, bound: float, size: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """The least and the greatest action in the units of the data; None if that takes more to know.

    Actions that are relative to what was just seen, say, have no edges of their own.
    """
    known = (UnnormalizerProcessorStep, DeviceProcessorStep)
    if not all(isinstance(step, known) for step in getattr(policy.postprocess, "steps", [None])):
        return None
    edges = torch.tensor([[-bound], [bound]]).repeat(1, size)
    low, high = policy.postprocess(edges).float().cpu().numpy()
    return low, high
