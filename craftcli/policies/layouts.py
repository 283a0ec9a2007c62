"""The order of batch, tokens and dim in the states that a layer returns."""

from collections.abc import Mapping

from torch import Tensor

from craftcli.choices import Layout
from craftcli.errors import EXIT_USAGE, CraftError

_DIMENSIONS = {Layout.BSD: (3,), Layout.SBD: (3,), Layout.BDS: (3, 4, 5), Layout.BD: (2,)}


def as_tokens(states: Tensor, layout: Layout | None) -> Tensor:
    """Reorder states to [batch, tokens, dim]; the pixels of a feature map become tokens."""
    if layout is None:
        raise ValueError("a stack that is named by its path needs a layout")
    if states.dim() not in _DIMENSIONS[layout]:
        raise CraftError(
            f"The layout {layout} does not fit these layers.",
            why=f"a layer returns a tensor of shape {tuple(states.shape)}.",
            fix="use another --layout, or leave the option out: craft then finds the layout.",
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
    """Find the layout from the shapes of the states for two batch sizes (rows -> shape).

    The axis that changes with the number of rows is the batch. Shapes do not distinguish tokens
    from dim: after a batch axis that comes first, [tokens, dim] is assumed, or [channels, pixels]
    if there are two or more axes of pixels.
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
            f"Cannot find the layout of {stack} from the shape of its states.",
            why=f"they are {tuple(one)} for {few} rows and {tuple(other)} for {many}.",
            fix="give it with --layout (b is the batch, s tokens, d numbers: bsd, sbd, bds or bd), "
            "or choose another list of layers.",
            exit_code=EXIT_USAGE,
        )
    return found
