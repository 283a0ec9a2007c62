"""Which adapter serves which policy."""

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import PolicyAdapter
from craftcli.policies.pi0_fast import Pi0FastAdapter

_ADAPTERS: tuple[PolicyAdapter, ...] = (Pi0FastAdapter(),)


def adapter_for(policy_type: str) -> PolicyAdapter:
    """The adapter of a LeRobot policy type, or an error that lists the types there are."""
    for adapter in _ADAPTERS:
        if policy_type in adapter.policy_types:
            return adapter
    known = sorted(name for adapter in _ADAPTERS for name in adapter.policy_types)
    raise CraftError(
        f"Policies of type {policy_type!r} are not supported yet.",
        why=f"craft has adapters for {', '.join(known)}.",
        fix="use one of these; another family is one new file in craftcli/policies.",
        exit_code=EXIT_USAGE,
    )
