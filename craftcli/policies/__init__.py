"""Policies: their layers, tokens and hidden states, and everything that touches LeRobot.

base             `PolicyAdapter`: what to write for a new policy family
families/        one module for each family, and the registry that chooses among them
lerobot/         LeRobot's checkpoints, datasets and training state
taps             read hidden states out of a running forward pass
shard_units      modules that FSDP2 can gather one at a time
pooling          which tokens are kept, and how they become vectors
tokens           token masks that several families share
attention_masks  attention masks of the policies that descend from openpi
seeded_noise     noise and times from one seed for each row
cameras          images of policies that need all of their cameras
layer_paths      lists of layers by their dotted path
layouts          the order of axes in the states of such layers
identity         the identities of teacher and dataset that a cache stores
"""

from typing import TYPE_CHECKING

from craftcli.lazy_names import lazy_names

if TYPE_CHECKING:
    from craftcli.policies.base import (
        Batch,
        FeatureRequest,
        Features,
        LayerStack,
        PolicyAdapter,
        PolicyOutput,
        TapPoint,
    )
    from craftcli.policies.families.registry import adapter_for
    from craftcli.policies.identity import DatasetIdentity, TeacherIdentity
    from craftcli.policies.pooling import Pooled, TokenMasks, pool
    from craftcli.policies.taps import may_stop, tap

__all__ = [
    "Batch",
    "DatasetIdentity",
    "FeatureRequest",
    "Features",
    "LayerStack",
    "PolicyAdapter",
    "PolicyOutput",
    "Pooled",
    "TapPoint",
    "TeacherIdentity",
    "TokenMasks",
    "adapter_for",
    "may_stop",
    "pool",
    "tap",
]

__getattr__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(
            (
                "Batch",
                "FeatureRequest",
                "Features",
                "LayerStack",
                "PolicyAdapter",
                "PolicyOutput",
                "TapPoint",
            ),
            "base",
        ),
        "DatasetIdentity": "identity",
        "Pooled": "pooling",
        "TeacherIdentity": "identity",
        "TokenMasks": "pooling",
        "adapter_for": "families.registry",
        "may_stop": "taps",
        "pool": "pooling",
        "tap": "taps",
    },
)
