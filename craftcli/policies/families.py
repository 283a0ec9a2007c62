"""What craft can do with which policies, as told by their adapters."""

from dataclasses import asdict, dataclass
from typing import Any

from lerobot.configs import PreTrainedConfig

from craftcli.choices import Mode, OutputKind
from craftcli.policies.base import PolicyAdapter
from craftcli.policies.loading import Checkpoint
from craftcli.policies.own_forward import OwnForwardAdapter
from craftcli.policies.paths import layer_lists
from craftcli.policies.registry import ADAPTERS, adapter_for, brought_types, register_plugins

_ALWAYS = (Mode.REPLAY, Mode.L2SP, Mode.EWC)
"""Modes that ask nothing of an adapter."""


@dataclass(frozen=True, kw_only=True)
class FamilyInfo:
    """One type of policy."""

    policy_type: str
    adapter: str
    """Who wrote its adapter: craft, or another package; "generic" where nobody did."""
    stacks: tuple[str, ...]
    """The default first; none for the generic adapter, which takes paths."""
    default_layers: tuple[int, ...]
    default_pooling: str | None
    modes: tuple[str, ...]
    tested: bool
    """Whether craft's own tests run it."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class PolicyInfo:
    """One checkpoint: what it has that can be retained."""

    family: FamilyInfo
    stacks: dict[str, int]
    """Layers of each stack that its adapter names."""
    lists: dict[str, int]
    """Layers of each list in it, by its path."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def all_families() -> list[FamilyInfo]:
    """Every policy type that LeRobot knows here, those with an adapter first."""
    register_plugins()
    known = PreTrainedConfig.get_known_choices()
    found = [family_info(policy_type) for policy_type in sorted(known)]
    return sorted(found, key=lambda info: info.adapter == "generic")


def family_info(policy_type: str) -> FamilyInfo:
    """What craft can do with policies of a type."""
    adapter = adapter_for(policy_type)
    generic = isinstance(adapter, OwnForwardAdapter)
    author = "generic" if generic else brought_types().get(policy_type, "craft")
    first = adapter.default_stack
    return FamilyInfo(
        policy_type=policy_type,
        adapter=author,
        stacks=tuple(sorted(adapter.stack_names, key=lambda name: name != first)),
        default_layers=() if generic else adapter.default_layers,
        default_pooling=None if generic else adapter.default_pooling.value,
        modes=tuple(mode.value for mode in (*_imitated(adapter), *_ALWAYS)),
        tested=adapter in ADAPTERS,
    )


def policy_info(policy: Checkpoint) -> PolicyInfo:
    """What a checkpoint has that can be retained."""
    stacks = policy.adapter.stacks(policy.policy)
    return PolicyInfo(
        family=family_info(policy.policy_type),
        stacks={name: len(stack) for name, stack in stacks.items()},
        lists=layer_lists(policy.policy),
    )


def _imitated(adapter: PolicyAdapter) -> tuple[Mode, ...]:
    match adapter.output_kind:
        case None:
            return (Mode.HIDDEN,)
        case OutputKind.VECTORS:
            return (Mode.HIDDEN, Mode.ACTION)
        case OutputKind.TOKENS:
            return (Mode.HIDDEN, Mode.ACTION, Mode.TOKEN_CE)
