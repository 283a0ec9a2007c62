"""What craft can do with each policy type: the content of `craft info --policies`."""

from dataclasses import asdict, dataclass
from typing import Any

from lerobot.configs import PreTrainedConfig

from craftcli.choices import Mode, OutputKind
from craftcli.policies.base import PolicyAdapter
from craftcli.policies.families.any_policy import GenericAdapter
from craftcli.policies.families.registry import (
    ADAPTERS,
    adapter_for,
    plugin_types,
    register_policy_plugins,
)
from craftcli.policies.layer_paths import layer_lists
from craftcli.policies.lerobot.checkpoint import Checkpoint

_ALWAYS = (Mode.REPLAY, Mode.L2SP, Mode.EWC)
"""Modes that need nothing from an adapter."""


@dataclass(frozen=True, kw_only=True)
class FamilyInfo:
    """What craft can do with one policy type."""

    policy_type: str
    adapter: str
    """The package that provides its adapter; "craft" for its own, "generic" if there is none."""
    stacks: tuple[str, ...]
    """The default first; empty for the generic adapter, which takes paths."""
    default_layers: tuple[int, ...]
    default_pooling: str | None
    modes: tuple[str, ...]
    tested: bool
    """Whether craft's own tests cover it."""

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class PolicyInfo:
    """The layers of one checkpoint that can be retained."""

    family: FamilyInfo
    stacks: dict[str, int]
    """Number of layers of each stack that the adapter names."""
    lists: dict[str, int]
    """Number of layers of each list of layers, by its path."""

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


def all_families() -> list[FamilyInfo]:
    """Every policy type that LeRobot knows here; those with an adapter come first."""
    register_policy_plugins()
    known = PreTrainedConfig.get_known_choices()
    found = [family_info(policy_type) for policy_type in sorted(known)]
    return sorted(found, key=lambda info: info.adapter == "generic")


def family_info(policy_type: str) -> FamilyInfo:
    """What craft can do with policies of this type."""
    adapter = adapter_for(policy_type)
    generic = isinstance(adapter, GenericAdapter)
    author = "generic" if generic else plugin_types().get(policy_type, "craft")
    first = adapter.default_stack
    return FamilyInfo(
        policy_type=policy_type,
        adapter=author,
        stacks=tuple(sorted(adapter.stack_names, key=lambda name: name != first)),
        default_layers=() if generic else adapter.default_layers,
        default_pooling=None if generic else adapter.default_pooling.value,
        modes=tuple(mode.value for mode in (*_imitation_modes(adapter), *_ALWAYS)),
        tested=adapter in ADAPTERS,
    )


def policy_info(policy: Checkpoint) -> PolicyInfo:
    """The layers of a checkpoint that can be retained."""
    stacks = policy.adapter.stacks(policy.policy)
    return PolicyInfo(
        family=family_info(policy.policy_type),
        stacks={name: len(stack) for name, stack in stacks.items()},
        lists=layer_lists(policy.policy),
    )


def _imitation_modes(adapter: PolicyAdapter) -> tuple[Mode, ...]:
    """The modes that compare the student with the teacher's output in a cache."""
    match adapter.output_kind:
        case None:
            return (Mode.HIDDEN,)
        case OutputKind.VECTORS:
            return (Mode.HIDDEN, Mode.ACTION)
        case OutputKind.TOKENS:
            return (Mode.HIDDEN, Mode.ACTION, Mode.TOKEN_CE)
