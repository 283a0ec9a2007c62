"""Inner products and weighted sums of a task and a retention gradient, group by group.

A gradient is a list with one entry for each trainable parameter. None means that the loss does not
reach the parameter; it counts as zero.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

type Gradients = Sequence[Tensor | None]
type Reduce = Callable[[Tensor], Tensor]

LARGEST_PIECE = 1 << 22
"""Most elements of one partial sum: few enough that its float32 rounding does not matter."""
SMALLEST_PIECE = 1 << 12
# A piece is copied when it is widened or not contiguous, and about four pieces exist at a time. At
# 128 pieces the copies stay below a tenth of the gradient.
_PIECES = 128


@dataclass(frozen=True)
class Products:
    """The inner products of a task and a retention gradient."""

    dot: float
    task_sq: float
    ret_sq: float

    @property
    def reached(self) -> bool:
        """Whether both gradients differ from zero; a zero gradient conflicts with nothing."""
        return self.task_sq != 0.0 and self.ret_sq != 0.0

    @property
    def cos(self) -> float:
        """The cosine of the two gradients; 0 if either is zero, NaN if either is not finite."""
        if not self.reached:
            return 0.0
        # Two roots, because the product of the squares can overflow.
        cosine = self.dot / math.sqrt(self.task_sq) / math.sqrt(self.ret_sq)
        # The cosine is the first argument: min and max then return it when it is NaN.
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
    """Compute <task, ret>, |task|² and |ret|² for each group of parameters.

    `groups` gives the group number of every parameter, from 0; None puts all into one group. This
    process sees only its shard of a sharded gradient (DTensor), so `reduce` must then sum a tensor
    [groups, 3] over the processes. A loss scale that both gradients carry is divided out. Partial
    sums are float32, which is safe for elements up to about 1e15; their total is float64.
    """
    table = product_table(task, ret, groups=groups)
    if reduce is not None:
        table = reduce(table)
    return unpack_products(table.flatten().tolist(), scale=scale)


@torch.no_grad()
def product_table(
    task: Gradients, ret: Gradients, *, groups: Sequence[int] | None = None
) -> Tensor:
    """The sums of `inner_products` [groups, 3], of this process and still on the device.

    One tensor for one transfer: a .item() per parameter would stall the device hundreds of times.
    """
    return _sum_table(task, ret, [0] * len(task) if groups is None else groups)


def unpack_products(values: Sequence[float], *, scale: float = 1.0) -> list[Products]:
    """The products of each group from the values of a `product_table`, read by the host."""
    square = scale * scale
    rows = itertools.batched((value / square for value in values), 3)
    return [Products(*row) for row in rows]


@dataclass(frozen=True)
class Weights:
    """The factors of the task and of the retention gradient in a weighted sum."""

    task: float
    ret: float


@torch.no_grad()
def weighted_sum_(
    task: Gradients,
    ret: Gradients,
    weights: Sequence[Weights],
    *,
    groups: Sequence[int] | None = None,
) -> list[Tensor | None]:
    """Add the two gradients in place, with the weights of each parameter's group.

    The result is in the task tensors, and in the retention tensor of a parameter that only
    retention reaches.
    """
    numbers = [0] * len(task) if groups is None else groups
    members: list[list[tuple[Tensor | None, Tensor | None]]] = [[] for _ in weights]
    for g_task, g_ret, number in zip(task, ret, numbers, strict=True):
        members[number].append((g_task, g_ret))
    for pairs, weight in zip(members, weights, strict=True):
        _sum_group_(pairs, weight)
    return [a if a is not None else b for a, b in zip(task, ret, strict=True)]


def _sum_group_(pairs: list[tuple[Tensor | None, Tensor | None]], weight: Weights) -> None:
    task = [local_shard(a) for a, _ in pairs if a is not None]
    both = [(local_shard(a), local_shard(b)) for a, b in pairs if a is not None and b is not None]
    only_ret = [local_shard(b) for a, b in pairs if a is None and b is not None]
    if task and weight.task != 1.0:
        torch._foreach_mul_(task, weight.task)
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both], alpha=weight.ret)
    if only_ret:
        torch._foreach_mul_(only_ret, weight.ret)


def local_shard(gradient: Tensor) -> Tensor:
    """The part of a gradient that this process holds: all of it, unless it is a DTensor."""
    # Found by its method: importing torch.distributed.tensor is slow and fails on some systems.
    to_local: Callable[[], Tensor] | None = getattr(gradient, "to_local", None)
    return gradient if to_local is None else to_local()


def _sum_table(task: Gradients, ret: Gradients, numbers: Sequence[int]) -> Tensor:
    """The three sums of every group as a tensor [groups, 3] on the gradients' device."""
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
    wide = widest_float(stacked.device)
    slots = torch.split(stacked, [len(slot) for slot in sums])
    return torch.stack([slot.sum(dtype=wide) for slot in slots]).view(count, 3)


def widest_float(device: torch.device) -> torch.dtype:
    """The widest float of a device: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _piece_size(task: Gradients, ret: Gradients) -> int:
    sides = [[local_shard(g).numel() for g in side if g is not None] for side in (task, ret)]
    elements = max(sum(side) for side in sides)
    return min(max(elements // _PIECES, SMALLEST_PIECE), LARGEST_PIECE)


def _pieces(gradients: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Split gradients of one shape into the same flat pieces, widened to at least float32."""
    shape, elements = gradients[0].shape, gradients[0].numel()
    if elements <= size:
        yield [_widen(g.reshape(-1)) for g in gradients]
    elif all(g.is_contiguous() for g in gradients):
        for start in range(0, elements, size):
            yield [_widen(g.view(-1)[start : start + size]) for g in gradients]
    else:
        # Halved along the longest side, because flattening would copy the whole gradient.
        side = max(range(len(shape)), key=lambda dim: shape[dim])
        half = shape[side] // 2
        for start, length in ((0, half), (half, shape[side] - half)):
            yield from _pieces([g.narrow(side, start, length) for g in gradients], size)


def _widen(piece: Tensor) -> Tensor:
    return piece if piece.dtype in (torch.float32, torch.float64) else piece.float()
