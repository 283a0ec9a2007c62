"""The observation history of policies that act on several past frames."""

from collections import deque

import torch
from lerobot.utils.constants import ACTION, OBS_IMAGES
from torch import Tensor

from craftcli.errors import CraftError
from craftcli.policies.base import Batch, Policy


def recall(policy: Policy, batch: Batch) -> Batch:
    """Fill a policy's observation queues with the history in the batch.

    Returns the batch for `predict_action_chunk`, which reads the queues. A policy without such
    queues is not changed.
    """
    queues = observation_queues(policy)
    if not queues:
        return batch
    # As in `select_action`: labels would be taken for actions that are still to be executed.
    seen = {key: value for key, value in batch.items() if key != ACTION}
    if OBS_IMAGES in queues:
        images = [batch[key] for key in policy.config.image_features if key in batch]
        # LeRobot drops the time axis of a video if it reads a single frame.
        images = [image.unsqueeze(1) if image.ndim == 4 else image for image in images]
        seen |= {OBS_IMAGES: torch.stack(images, dim=-4)} if images else {}
    missing = [key for key in queues if key not in seen]
    if missing:
        raise CraftError(
            "Cannot fill the policy's history.",
            why=f"a {policy.config.type} policy remembers {', '.join(missing)}, which the data do "
            "not have.",
            fix="build the cache with --kind hidden+action: the teacher's actions are then in it.",
        )
    for key, queue in queues.items():
        queue.extend(seen[key].unbind(1))
    return seen


def observation_queues(policy: Policy) -> dict[str, deque[Tensor]]:
    """The queues of past observations by feature name; empty if the policy acts on one frame."""
    # LeRobot's policies have no public way to read or fill them.
    queues = getattr(policy, "_queues", None) or {}
    return {key: queue for key, queue in queues.items() if key != ACTION}
