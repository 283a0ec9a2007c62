"""Which adapter serves which policy: craft's own, another package's, or the generic."""

import functools
from importlib.metadata import EntryPoint, entry_points

from lerobot.configs import PreTrainedConfig
from lerobot.utils.import_utils import register_third_party_plugins

from craftcli.errors import CraftError
from craftcli.policies.act import ActAdapter
from craftcli.policies.base import PolicyAdapter
from craftcli.policies.diffusion import DiffusionAdapter
from craftcli.policies.multi_task_dit import MultiTaskDitAdapter
from craftcli.policies.own_forward import OwnForwardAdapter
from craftcli.policies.pi0 import Pi0Adapter
from craftcli.policies.pi0_fast import Pi0FastAdapter
from craftcli.policies.pi05 import Pi05Adapter
from craftcli.policies.smolvla import SmolVLAAdapter
from craftcli.policies.vqbet import VqBetAdapter
from craftcli.policies.xvla import XvlaAdapter

GROUP = "craftcli.policies"
"""Entry points of packages that bring adapters: LeRobot's policy type = the adapter's class."""

ADAPTERS: tuple[PolicyAdapter, ...] = (
    Pi0FastAdapter(),
    Pi0Adapter(),
    Pi05Adapter(),
    SmolVLAAdapter(),
    ActAdapter(),
    DiffusionAdapter(),
    VqBetAdapter(),
    MultiTaskDitAdapter(),
    XvlaAdapter(),
)


def adapter_for(policy_type: str) -> PolicyAdapter:
    """The adapter of a LeRobot policy type; the generic one where nobody wrote any."""
    own, brought = _own(), _brought()
    for family in _families(policy_type):
        if family in brought:
            return _load(brought[family])
        if family in own:
            return own[family]
    return OwnForwardAdapter()


@functools.cache
def register_plugins() -> None:
    """Let packages named lerobot_policy_... register their policy types, as LeRobot does."""
    register_third_party_plugins()


def brought_types() -> dict[str, str]:
    """The policy types that other packages bring adapters for, and those packages."""
    return {name: _package(entry) for name, entry in _brought().items()}


def _own() -> dict[str, PolicyAdapter]:
    return {name: adapter for adapter in ADAPTERS for name in adapter.policy_types}


def _brought() -> dict[str, EntryPoint]:
    """Adapters of other packages, not yet imported; two for one type are an error."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        rival = "craft itself" if entry.name in _own() else None
        if entry.name in found:
            rival = _package(found[entry.name])
        if rival:
            raise CraftError(
                f"There are two adapters for policies of type {entry.name!r}.",
                why=f"one is of {_package(entry)} ({entry.value}), the other of {rival}.",
                fix="uninstall one of them, or give its policy type a name of its own.",
            )
        found[entry.name] = entry
    return found


def _load(entry: EntryPoint) -> PolicyAdapter:
    try:
        found = entry.load()
        adapter = found() if isinstance(found, type) else found
    except Exception as error:  # anything may be wrong in code of others
        raise _unusable(entry, f"{type(error).__name__}: {error}") from error
    if not isinstance(adapter, PolicyAdapter):
        raise _unusable(entry, f"it is a {type(adapter).__name__}, no PolicyAdapter")
    return adapter


def _unusable(entry: EntryPoint, why: str) -> CraftError:
    return CraftError(
        f"The adapter for policies of type {entry.name!r} cannot be used.",
        why=f"{entry.value} of {_package(entry)}: {why}.",
        fix="mend or uninstall that package; without it the generic adapter serves such policies.",
    )


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unknown package"


def _families(policy_type: str) -> list[str]:
    """The type itself, then those it was derived from: a variant of pi05 is served as pi05."""
    types = PreTrainedConfig.get_known_choices()
    names = {config: name for name, config in types.items()}
    bases = types[policy_type].__mro__[1:] if policy_type in types else ()
    return [policy_type, *(names[base] for base in bases if base in names)]
