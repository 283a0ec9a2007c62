"""The images of a policy that cannot do without any of its cameras."""

from torch import Tensor

from craftcli.errors import CraftError
from craftcli.policies.base import Batch, Policy


def camera_images(policy: Policy, batch: Batch) -> list[Tensor]:
    """The images of every camera in the policy's own order, or an error that names the missing."""
    cameras = list(policy.config.image_features)
    missing = [key for key in cameras if key not in batch]
    if missing:
        raise CraftError(
            f"The camera {missing[0]} is missing.",
            why=f"{policy.config.type} has no way to leave out one of {', '.join(cameras)}.",
            fix="use a dataset that has all of these cameras.",
        )
    return [batch[key] for key in cameras]
