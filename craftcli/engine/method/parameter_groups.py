"""Groups of parameters that share one projection decision, as a group number per parameter."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

# Greedy, so that the innermost of several nested containers counts.
_LAYER = re.compile(r"(?:.*\.)?(?:layers?|blocks?|resblocks|h)\.\d+(?=\.)")
_INDEXED = re.compile(r".*\.\d+(?=\.)|\d+(?=\.)")


def layer_groups(names: Sequence[str]) -> list[int]:
    """Group parameters by the layer in their name; groups are numbered by first appearance.

    The layer is the innermost `layers.<n>` or `blocks.<n>`, else the innermost module with a
    number, else the module that holds the parameter.

    >>> layer_groups(["a.layers.0.fc.weight", "a.layers.1.fc.weight", "a.layers.0.norm", "b.bias"])
    [0, 1, 0, 2]
    """
    return _number(_layer_of(name) for name in names)


def optimizer_groups(
    parameters: Sequence[Tensor], param_groups: Iterable[Mapping[str, Any]]
) -> list[int]:
    """Group parameters by the optimizer's groups; parameters in none of them form one more."""
    owner = {
        id(parameter): number
        for number, group in enumerate(param_groups)
        for parameter in group["params"]
    }
    return _number(owner.get(id(parameter)) for parameter in parameters)


def _layer_of(name: str) -> str:
    found = _LAYER.match(name) or _INDEXED.match(name)
    return found.group() if found else name.rpartition(".")[0]


def _number(keys: Iterable[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
