"""Where the batch, the tokens and the numbers are in what a layer returns."""

from collections.abc import Mapping

from torch import Tensor

from craftcli.choices import Layout
from craftcli.errors import EXIT_USAGE, CraftError

_DIMENSIONS = {Layout.BSD: (3,), Layout.SBD: (3,), Layout.BDS: (3, 4, 5), Layout.BD: (2,)}


def as_tokens(states: Tensor, layout: Layout | None) -> Tensor:
    """The states as [batch, tokens, dim]; the places of a picture become tokens."""
    if layout is None:
        raise ValueError("the layout of a stack that is named by its path must be known")
    if states.dim() not in _DIMENSIONS[layout]:
        raise CraftError(
            f"The states do not lie as {layout} says.",
            why=f"a layer returns a tensor of shape {tuple(states.shape)}.",
            fix="use another --layout, or leave it out to have it found.",
            exit_code=EXIT_USAGE,
        )
    match layout:
        case Layout.BSD:
            return states
        case Layout.SBD:
            return states.transpose(0, 1)
        case Layout.BDS:
            return states.flatten(2).transpose(1, 2)
        case Layout.BD:
            return states.unsqueeze(1)


def layout_of(shapes: Mapping[int, tuple[int, ...]], *, stack: str) -> Layout:
    """The layout of states that have these shapes for batches of so many rows.

    Tokens and numbers cannot be told apart by shape: with the batch first they are taken to come
    in this order, or as channels and places where there are two axes of places.
    """
    (few, one), (many, other) = shapes.items()
    axes = [
        axis
        for axis, sizes in enumerate(zip(one, other, strict=False))
        if sizes == (few, many) and len(one) == len(other)
    ]
    changed = [axis for axis, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    known = {
        (0, 2): Layout.BD,
        (0, 3): Layout.BSD,
        (0, 4): Layout.BDS,
        (0, 5): Layout.BDS,
        (1, 3): Layout.SBD,
    }
    found = known.get((axes[0], len(one))) if len(axes) == 1 and changed == axes else None
    if found is None:
        raise CraftError(
            f"How the states of {stack} lie cannot be seen from their shape.",
            why=f"they are {tuple(one)} for {few} rows and {tuple(other)} for {many}.",
            fix="say it with --layout (b is the batch, s tokens, d numbers: bsd, sbd, bds or bd), "
            "or choose another list of layers.",
            exit_code=EXIT_USAGE,
        )
    return found
