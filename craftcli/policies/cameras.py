"""The images of policies that need all of their cameras."""

from torch import Tensor

from craftcli.errors import CraftError
from craftcli.policies.base import Batch, Policy


def camera_images(policy: Policy, batch: Batch) -> list[Tensor]:
    """The images of all cameras in the policy's order; a missing camera is an error."""
    cameras = list(policy.config.image_features)
    missing = [key for key in cameras if key not in batch]
    if missing:
        raise CraftError(
            f"The camera {missing[0]} is missing.",
            why=f"a {policy.config.type} policy needs all of {', '.join(cameras)}.",
            fix="use a dataset that has all of these cameras.",
        )
    return [batch[key] for key in cameras]
