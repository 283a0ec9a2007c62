"""One module for each policy family, with everything that is special about it.

act, diffusion, vqbet, multi_task_dit    policies with one transformer or U-Net over actions
pi0, pi05, smolvla, pi0_fast,
xvla, groot, molmoact2                   vision-language-action policies
flow                                     shared by pi0, pi05 and smolvla
any_policy                               policies without an adapter; stacks named by a path
registry                                 which adapter serves which policy
"""

from craftcli.policies.families.act import ActAdapter
from craftcli.policies.families.any_policy import GenericAdapter, PathAdapter
from craftcli.policies.families.diffusion import DiffusionAdapter
from craftcli.policies.families.flow import FlowAdapter
from craftcli.policies.families.groot import GrootAdapter
from craftcli.policies.families.molmoact2 import MolmoAct2Adapter
from craftcli.policies.families.multi_task_dit import MultiTaskDitAdapter
from craftcli.policies.families.pi0 import Pi0Adapter
from craftcli.policies.families.pi0_fast import Pi0FastAdapter
from craftcli.policies.families.pi05 import Pi05Adapter
from craftcli.policies.families.registry import ADAPTERS, ENTRY_POINT_GROUP, adapter_for
from craftcli.policies.families.smolvla import SmolVLAAdapter
from craftcli.policies.families.vqbet import VqBetAdapter
from craftcli.policies.families.xvla import XvlaAdapter

__all__ = [
    "ADAPTERS",
    "ENTRY_POINT_GROUP",
    "ActAdapter",
    "DiffusionAdapter",
    "FlowAdapter",
    "GenericAdapter",
    "GrootAdapter",
    "MolmoAct2Adapter",
    "MultiTaskDitAdapter",
    "PathAdapter",
    "Pi0Adapter",
    "Pi0FastAdapter",
    "Pi05Adapter",
    "SmolVLAAdapter",
    "VqBetAdapter",
    "XvlaAdapter",
    "adapter_for",
]
