"""Finding lists of layers in any policy by their dotted path."""

from typing import Any

from torch import nn

from craftcli.errors import EXIT_USAGE, CraftError

_SHOWN = 12


def is_path(stack: str) -> bool:
    """Whether `stack` is a path in the policy, and not a name that its adapter defines."""
    return "." in stack


def layer_lists(policy: nn.Module) -> dict[str, int]:
    """The path and the number of layers of every module list.

    Sequential modules are listed only if there is no module list: a policy has many of them, and
    few are its layers.
    """
    for kind in (nn.ModuleList, nn.Sequential):
        found = {
            path: len(module)
            for path, module in policy.named_modules()
            if isinstance(module, kind) and len(module) and is_path(path)
        }
        if found:
            return found
    return {}


def describe_lists(policy: nn.Module) -> str:
    """All lists of layers in one line, the longest first."""
    found = sorted(layer_lists(policy).items(), key=lambda item: -item[1])
    shown = [f"{path} ({count})" for path, count in found[:_SHOWN]]
    more = [f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return ", ".join(shown + more) or "no list of layers"


def layers_at(policy: nn.Module, path: str) -> list[nn.Module]:
    """The layers at a path, or an error that lists the paths that exist."""
    try:
        found: Any = policy.get_submodule(path)
    except AttributeError:
        found = None
    if not isinstance(found, nn.ModuleList | nn.Sequential) or not len(found):
        kind = "nothing" if found is None else f"a {type(found).__name__}"
        raise CraftError(
            f"There is no list of layers at {path}.",
            why=f"the policy has {kind} there; its lists of layers are {describe_lists(policy)}.",
            fix="give --stack one of these paths.",
            exit_code=EXIT_USAGE,
        )
    return list(found)
