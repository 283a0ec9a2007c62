"""A warning about actions that a policy cannot execute with its normaliser.

By default it keeps the teacher's statistics, and diffusion policies clip actions at its ±1. A new
task with larger actions than the old ones is then learned to a small loss but never executed: in
Meta-World, a policy that had never pulled (pick-place) opened no door in 50 episodes. An action
that never changed in the old data has no scale at all, for any policy.
"""

from typing import Any

import numpy as np
import torch
from lerobot.processor import DeviceProcessorStep, UnnormalizerProcessorStep
from lerobot.utils.constants import ACTION
from numpy.typing import NDArray

from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.fast_rows import number_parts

MARGIN = 0.02
"""How far beyond the limit, in half ranges, an action is still executed almost unchanged."""
WARNING_SHARE = 0.005
"""Share of clipped actions that is worth a warning: almost every new dataset has a few."""
CONSTANT = 1e-6
"""A range that counts as none, relative to the size of the action itself."""


def describe_out_of_reach(policy: Checkpoint, dataset: Any) -> str | None:
    """Which of the dataset's actions the policy cannot execute, and the fix; None if it can."""
    bound = policy.adapter.action_bound(policy.policy)
    actions = _actions(dataset)
    edges = None if actions is None else _edges(policy, bound or 1.0, actions.shape[1])
    if actions is None or edges is None:
        return None
    # A widened range may run downwards.
    low, high = np.minimum(*edges), np.maximum(*edges)
    constant = high - low <= CONSTANT * (1 + np.abs(low))
    newly_moving = constant & (np.abs(actions - low).max(axis=0) > 1e-3)
    if newly_moving.any():
        return _describe_constant(int(newly_moving.argmax()), low, actions)
    if bound is None or constant.all():
        return None
    # Distance from the middle of the range in half ranges: the policy clips at 1.
    width = np.where(constant, np.inf, high - low)
    distance = np.abs(2 * actions - low - high) / width
    share = (distance > 1 + MARGIN).any(axis=1).mean()
    if share < WARNING_SHARE:
        return None
    # A quantile, because some frames may be broken. One limit serves all actions.
    furthest = np.quantile(distance, 0.999, axis=0)
    worst = int(furthest.argmax())
    return (
        f"{share:.1%} of the actions to be learned are out of the policy's reach: it clips action "
        f"{worst} at {low[worst]:.3g} and {high[worst]:.3g}, and the data go from "
        f"{actions[:, worst].min():.3g} to {actions[:, worst].max():.3g}. Set clip_sample_range in "
        f"the checkpoint's config.json to {np.ceil(10 * bound * furthest[worst]) / 10:g} before "
        "building the cache."
    )


def _describe_constant(number: int, low: NDArray[Any], actions: NDArray[Any]) -> str:
    return (
        f"action {number} was always {low[number]:.3g} in the data of the policy's normaliser, so "
        f"it has no scale there; in the new data it goes from {actions[:, number].min():.3g} to "
        f"{actions[:, number].max():.3g}. --stats widen gives it a scale."
    )


def _actions(dataset: Any) -> NDArray[Any] | None:
    """The dataset's actions [frames, size], only finite ones; None if there are none."""
    parts = number_parts(dataset.hf_dataset.data.column(ACTION))
    if not parts:
        return None
    actions = np.concatenate([part.reshape(len(part), -1) for part in parts])
    finite: NDArray[Any] = actions[np.isfinite(actions).all(axis=1)]
    return finite if len(finite) else None


def _edges(policy: Checkpoint, bound: float, size: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """The smallest and the largest action in the units of the data; None if that is unknown.

    With other steps after the unnormaliser (for actions relative to the state, for example), the
    limits depend on the observation.
    """
    known = (UnnormalizerProcessorStep, DeviceProcessorStep)
    if not all(isinstance(step, known) for step in getattr(policy.postprocess, "steps", [None])):
        return None
    edges = torch.tensor([[-bound], [bound]]).repeat(1, size)
    low, high = policy.postprocess(edges).float().cpu().numpy()
    return low, high
