"""The memory of policies that act on what they saw before, not on one frame alone."""

import torch
from lerobot.utils.constants import ACTION, OBS_IMAGES

from craftcli.errors import CraftError
from craftcli.policies.base import Batch, Policy


def recall(policy: Policy, batch: Batch) -> Batch:
    """Fill a policy's queues as if it had lived through the history that comes with the frames.

    Gives the batch with what `predict_action_chunk` then looks up in them; a policy without such
    queues is left alone.
    """
    queues = getattr(policy, "_queues", None) or {}
    observed = [key for key in queues if key != ACTION]
    if not observed:
        return batch
    # As in `select_action`: labels would be taken for actions that are still to be acted out.
    seen = {key: value for key, value in batch.items() if key != ACTION}
    if OBS_IMAGES in observed:
        images = [batch[key] for key in policy.config.image_features if key in batch]
        # LeRobot drops the time axis of a video of which it reads one frame.
        images = [image.unsqueeze(1) if image.ndim == 4 else image for image in images]
        seen |= {OBS_IMAGES: torch.stack(images, dim=-4)} if images else {}
    missing = [key for key in observed if key not in seen]
    if missing:
        raise CraftError(
            "The policy cannot be shown what it saw before.",
            why=f"a {policy.config.type} keeps {', '.join(missing)}, which the data do not have.",
            fix="build the cache with --kind hidden+action: it then holds what is compared.",
        )
    for key in observed:
        queues[key].extend(seen[key].unbind(1))
    return seen
