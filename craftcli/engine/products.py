"""Inner products of a task and a retention gradient, over all parameters or by group of them.

Gradients are lists with one entry a trainable parameter; None says that the loss does not reach
that parameter, and counts as zero.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

type Gradients = Sequence[Tensor | None]
type Reduce = Callable[[Tensor], Tensor]

# Elements a partial sum runs over at most: its float32 rounding does not matter then.
_LARGEST_PIECE = 1 << 22
_SMALLEST_PIECE = 1 << 12
# Pieces are copied when they are widened or not contiguous, and about four exist at a time. With so
# many to a gradient they stay within a tenth of it.
_PIECES = 128


@dataclass(frozen=True)
class Products:
    """The inner products of a task and a retention gradient."""

    dot: float
    task_sq: float
    ret_sq: float

    @property
    def reached(self) -> bool:
        """Whether both losses have a say: a zero gradient can neither conflict nor be helped."""
        return self.task_sq != 0.0 and self.ret_sq != 0.0

    @property
    def cos(self) -> float:
        """The cosine between the two; 0 when either is zero, NaN when either is not finite."""
        if not self.reached:
            return 0.0
        # One root each: the product of the squares can leave the range of a float.
        cosine = self.dot / math.sqrt(self.task_sq) / math.sqrt(self.ret_sq)
        # The value goes first, because min and max return their first argument beside a NaN.
        return min(max(cosine, -1.0), 1.0)

    def conflict(self, threshold: float) -> bool:
        """Whether the cosine is below the threshold; a zero gradient conflicts with nothing."""
        return self.reached and self.cos < threshold

    def scale_retention(self, factor: float) -> "Products":
        """The products with the retention gradient multiplied by the factor."""
        return Products(dot=self.dot * factor, task_sq=self.task_sq, ret_sq=self.ret_sq * factor**2)

    def __add__(self, other: Self) -> "Products":
        return Products(
            dot=self.dot + other.dot,
            task_sq=self.task_sq + other.task_sq,
            ret_sq=self.ret_sq + other.ret_sq,
        )


@torch.no_grad()
def inner_products(
    task: Gradients,
    ret: Gradients,
    *,
    groups: Sequence[int] | None = None,
    reduce: Reduce | None = None,
    scale: float = 1.0,
) -> list[Products]:
    """Accumulate <task, ret>, |task|² and |ret|² for each group of parameters.

    `groups` numbers the group of every parameter from 0; None puts all into one. Of a sharded
    gradient (DTensor) this process sees its shard, and `reduce` must sum a tensor [groups, 3] over
    the processes that share the shards. Both gradients may carry a loss scale, which is divided
    out. Partial sums are float32 (so elements up to about 1e15 are safe), their sum is float64.
    """
    numbers = [0] * len(task) if groups is None else groups
    table = _sum_table(task, ret, numbers)
    if reduce is not None:
        table = reduce(table)
    # One transfer: a .item() per parameter would stall the device hundreds of times.
    rows: list[list[float]] = table.tolist()
    square = scale * scale
    return [Products(*(value / square for value in row)) for row in rows]


def local_shard(gradient: Tensor) -> Tensor:
    """What of a gradient lies in this process: all of it, unless it is a DTensor."""
    # By name, because importing torch.distributed.tensor is slow and not possible everywhere.
    to_local: Callable[[], Tensor] | None = getattr(gradient, "to_local", None)
    return gradient if to_local is None else to_local()


def _sum_table(task: Gradients, ret: Gradients, numbers: Sequence[int]) -> Tensor:
    """The three sums of every group, on the device of the gradients: [groups, 3]."""
    count = max(numbers, default=0) + 1
    sums: list[list[Tensor]] = [[] for _ in range(3 * count)]
    size = _piece_size(task, ret)
    for g_task, g_ret, number in zip(task, ret, numbers, strict=True):
        dots, task_sqs, ret_sqs = sums[3 * number : 3 * number + 3]
        if g_task is not None and g_ret is not None:
            for a, b in _pieces([local_shard(g_task), local_shard(g_ret)], size):
                dots.append(torch.dot(a, b))
                task_sqs.append(torch.dot(a, a))
                ret_sqs.append(torch.dot(b, b))
        elif g_task is not None:
            task_sqs.extend(torch.dot(a, a) for (a,) in _pieces([local_shard(g_task)], size))
        elif g_ret is not None:
            ret_sqs.extend(torch.dot(b, b) for (b,) in _pieces([local_shard(g_ret)], size))
    scalars = [scalar for slot in sums for scalar in slot]
    if not scalars:
        return torch.zeros(count, 3, dtype=torch.float64)
    stacked = torch.stack(scalars)
    # Apple's GPUs have no float64.
    wide = torch.float32 if stacked.device.type == "mps" else torch.float64
    slots = torch.split(stacked, [len(slot) for slot in sums])
    return torch.stack([slot.sum(dtype=wide) for slot in slots]).view(count, 3)


def _piece_size(task: Gradients, ret: Gradients) -> int:
    sides = [[local_shard(g).numel() for g in side if g is not None] for side in (task, ret)]
    elements = max(sum(side) for side in sides)
    return min(max(elements // _PIECES, _SMALLEST_PIECE), _LARGEST_PIECE)


def _pieces(gradients: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Walk over gradients of one shape together, in flat pieces of at least float32."""
    shape, elements = gradients[0].shape, gradients[0].numel()
    if elements <= size:
        yield [_widen(g.reshape(-1)) for g in gradients]
    elif all(g.is_contiguous() for g in gradients):
        for start in range(0, elements, size):
            yield [_widen(g.view(-1)[start : start + size]) for g in gradients]
    else:
        # Halved along its longest side, because flattening it would copy it whole.
        side = max(range(len(shape)), key=lambda dim: shape[dim])
        half = shape[side] // 2
        for start, length in ((0, half), (half, shape[side] - half)):
            yield from _pieces([g.narrow(side, start, length) for g in gradients], size)


def _widen(piece: Tensor) -> Tensor:
    return piece if piece.dtype in (torch.float32, torch.float64) else piece.float()
