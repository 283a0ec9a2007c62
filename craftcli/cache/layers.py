"""Layer indices of either sign: -1 is the last layer of a stack, 0 the first."""

from collections.abc import Sequence

from craftcli.errors import EXIT_USAGE, CraftError


def parse_layers(text: str) -> tuple[int, ...]:
    """Read a comma-separated list of layer indices.

    >>> parse_layers("-2, -1")
    (-2, -1)

    Raises:
        CraftError: one is no whole number, or is there twice.
    """
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CraftError(
            f"Cannot read the layers {text!r}.",
            why="layers are whole numbers separated by commas.",
            fix="write them like --layers -2,-1.",
            exit_code=EXIT_USAGE,
        ) from None
    if len(set(layers)) < len(layers):
        raise CraftError(
            f"Layers {_join(layers)} name a layer more than once.",
            why="every layer is stored once.",
            fix="name each layer once.",
            exit_code=EXIT_USAGE,
        )
    return layers


def resolve_layers(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """Turn layer indices of either sign into non-negative ones; the order stays.

    >>> resolve_layers([-2, -1], count=12)
    (10, 11)
    """
    valid = f"{-count} to {count - 1}"
    outside = [layer for layer in layers if not -count <= layer < count]
    if outside:
        raise CraftError(
            f"No layer {_join(outside)} in this stack.",
            why=f"it has {count} layers, so an index is {valid} (-1 is the last).",
            fix=f"choose layers from {valid}.",
            exit_code=EXIT_USAGE,
        )
    resolved = tuple(layer % count for layer in layers)
    repeated = [
        layer for layer, index in zip(layers, resolved, strict=True) if resolved.count(index) > 1
    ]
    if repeated:
        raise CraftError(
            f"Layers {_join(repeated)} name a layer more than once.",
            why=f"of {count} layers, k and k-{count} are the same one.",
            fix=f"name each layer once, from {valid}.",
            exit_code=EXIT_USAGE,
        )
    return resolved


def _join(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
