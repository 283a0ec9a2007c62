"""Which adapter serves which policy.

An adapter is one of craft's own, `ADAPTERS`, or another package provides it as an entry point of
the group "craftcli.policies". Two adapters for the same policy type are an error.

A policy is served by the adapter of its own type; else by that of the nearest type that its
configuration class derives from (a variant of pi05 is served as pi05); else by the generic adapter,
which reads stacks by their path.
"""

import functools
from importlib.metadata import EntryPoint, entry_points

from lerobot.configs import PreTrainedConfig
from lerobot.utils.import_utils import register_third_party_plugins

from craftcli.errors import CraftError
from craftcli.policies.base import PolicyAdapter
from craftcli.policies.families.act import ActAdapter
from craftcli.policies.families.any_policy import GenericAdapter
from craftcli.policies.families.diffusion import DiffusionAdapter
from craftcli.policies.families.groot import GrootAdapter
from craftcli.policies.families.molmoact2 import MolmoAct2Adapter
from craftcli.policies.families.multi_task_dit import MultiTaskDitAdapter
from craftcli.policies.families.pi0 import Pi0Adapter
from craftcli.policies.families.pi0_fast import Pi0FastAdapter
from craftcli.policies.families.pi05 import Pi05Adapter
from craftcli.policies.families.smolvla import SmolVLAAdapter
from craftcli.policies.families.vqbet import VqBetAdapter
from craftcli.policies.families.xvla import XvlaAdapter

ENTRY_POINT_GROUP = "craftcli.policies"
"""Entry points of packages that provide adapters: name = policy type, value = adapter class."""


def checked(adapter: PolicyAdapter) -> PolicyAdapter:
    """The adapter itself, if it sets everything that every adapter must set.

    Python refuses a class without the abstract methods, but not one without the class variables.

    Raises:
        TypeError: a class variable is missing.
    """
    if unset := adapter.unset():
        raise TypeError(
            f"{type(adapter).__name__} does not set {', '.join(unset)}; "
            "craftcli/policies/base.py says what they mean"
        )
    return adapter


ADAPTERS: tuple[PolicyAdapter, ...] = (
    checked(Pi0FastAdapter()),
    checked(Pi0Adapter()),
    checked(Pi05Adapter()),
    checked(SmolVLAAdapter()),
    checked(ActAdapter()),
    checked(DiffusionAdapter()),
    checked(VqBetAdapter()),
    checked(MultiTaskDitAdapter()),
    checked(XvlaAdapter()),
    checked(GrootAdapter()),
    checked(MolmoAct2Adapter()),
)


def adapter_for(policy_type: str) -> PolicyAdapter:
    """The adapter of a LeRobot policy type; the generic one if nobody wrote any."""
    own, plugins = _own_adapters(), _plugins()
    for family in _with_base_types(policy_type):
        if family in plugins:
            return _load(plugins[family])
        if family in own:
            return own[family]
    return GenericAdapter()


@functools.cache
def register_policy_plugins() -> None:
    """Import packages named lerobot_policy_*, lerobot_env_* and so on.

    They register policies and environments with LeRobot.
    """
    register_third_party_plugins()


def plugin_types() -> dict[str, str]:
    """The policy types whose adapters come from other packages, and the names of those packages."""
    return {name: _package(entry) for name, entry in _plugins().items()}


def _own_adapters() -> dict[str, PolicyAdapter]:
    return {name: adapter for adapter in ADAPTERS for name in adapter.policy_types}


def _plugins() -> dict[str, EntryPoint]:
    """Adapters of other packages, not imported yet. Two adapters for one type are an error."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        rival = "craft itself" if entry.name in _own_adapters() else None
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
    except Exception as error:  # the code of another package may raise anything
        raise _unusable(entry, f"{type(error).__name__}: {error}") from error
    if not isinstance(adapter, PolicyAdapter):
        raise _unusable(entry, f"it is a {type(adapter).__name__}, not a PolicyAdapter")
    try:
        return checked(adapter)
    except TypeError as error:
        raise _unusable(entry, str(error)) from error


def _unusable(entry: EntryPoint, why: str) -> CraftError:
    return CraftError(
        f"The adapter for policies of type {entry.name!r} cannot be used.",
        why=f"{entry.value} of {_package(entry)}: {why}.",
        fix="repair or uninstall that package; without it the generic adapter serves such "
        "policies.",
    )


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unknown package"


def _with_base_types(policy_type: str) -> list[str]:
    """The type itself, then the types that its configuration class derives from."""
    types = PreTrainedConfig.get_known_choices()
    names = {config: name for name, config in types.items()}
    bases = types[policy_type].__mro__[1:] if policy_type in types else ()
    return [policy_type, *(names[base] for base in bases if base in names)]
