"""Gradient surgery: take out of the task gradient what works against retention, then merge.

Gradients are lists with one entry a trainable parameter; None says that the loss does not reach
that parameter, and counts as zero.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from craftcli.choices import Merge

type Gradients = Sequence[Tensor | None]

# Elements a float32 partial sum runs over. Short enough that its rounding does not matter, and it
# bounds the temporary that a bfloat16 gradient is widened into.
_PIECE = 1 << 22


@dataclass(frozen=True)
class Products:
    """The inner products of a task and a retention gradient."""

    dot: float
    task_sq: float
    ret_sq: float

    @property
    def cos(self) -> float:
        """The cosine between the two; 0 when either is zero, NaN when either is not finite."""
        if self.task_sq == 0.0 or self.ret_sq == 0.0:
            return 0.0
        # One root each: the product of the squares can leave the range of a float.
        cosine = self.dot / math.sqrt(self.task_sq) / math.sqrt(self.ret_sq)
        # The value goes first, because min and max return their first argument beside a NaN.
        return min(max(cosine, -1.0), 1.0)

    def conflict(self, threshold: float) -> bool:
        """Whether the cosine is below the threshold; a zero gradient conflicts with nothing."""
        return self.task_sq != 0.0 and self.ret_sq != 0.0 and self.cos < threshold


@dataclass(frozen=True)
class SurgeryReport:
    """What one operation saw, before it changed anything."""

    dot: float
    cos: float
    task_norm: float
    ret_norm: float
    conflict: bool


def operate_(
    task: Gradients, ret: Gradients, *, threshold: float, project: bool, merge: Merge, lam: float
) -> tuple[list[Tensor | None], SurgeryReport]:
    """Project the task gradient if it conflicts, and merge the two, in place (both are used up)."""
    products = inner_products(task, ret)
    projection = projection_coefficient(products, threshold) if project else 0.0
    merged = merge_gradients_(task, ret, projection=projection, merge=merge, lam=lam)
    report = SurgeryReport(
        dot=products.dot,
        cos=products.cos,
        task_norm=math.sqrt(products.task_sq),
        ret_norm=math.sqrt(products.ret_sq),
        conflict=products.conflict(threshold),
    )
    return merged, report


@torch.no_grad()
def inner_products(task: Gradients, ret: Gradients) -> Products:
    """Accumulate <task, ret>, |task|² and |ret|² over all parameters.

    Partial sums are float32 (so elements up to about 1e15 are safe), their sum is float64.
    """
    dots: list[Tensor] = []
    task_sqs: list[Tensor] = []
    ret_sqs: list[Tensor] = []
    for g_task, g_ret in zip(task, ret, strict=True):
        if g_task is not None and g_ret is not None:
            for a, b in zip(_pieces(g_task), _pieces(g_ret), strict=True):
                dots.append(torch.dot(a, b))
                task_sqs.append(torch.dot(a, a))
                ret_sqs.append(torch.dot(b, b))
        elif g_task is not None:
            task_sqs.extend(torch.dot(a, a) for a in _pieces(g_task))
        elif g_ret is not None:
            ret_sqs.extend(torch.dot(b, b) for b in _pieces(g_ret))
    scalars = dots + task_sqs + ret_sqs
    # One transfer: a .item() per parameter would stall the device hundreds of times.
    values: list[float] = torch.stack(scalars).tolist() if scalars else []
    squares = values[len(dots) :]
    return Products(
        dot=sum(values[: len(dots)], 0.0),
        task_sq=sum(squares[: len(task_sqs)], 0.0),
        ret_sq=sum(squares[len(task_sqs) :], 0.0),
    )


def projection_coefficient(products: Products, threshold: float) -> float:
    """How much of the retention gradient to take out of the task gradient; 0 without conflict.

    The threshold is a cosine, so the decision does not depend on the size of the gradients.
    """
    return products.dot / products.ret_sq if products.conflict(threshold) else 0.0


def merge_weights(merge: Merge, lam: float) -> tuple[float, float]:
    """The weights of the task and of the retention gradient."""
    match merge:
        case Merge.WEIGHTED:
            return 1.0, lam
        case Merge.TASK_PRIORITY:
            return 1.0, min(lam, 1.0)
        case Merge.EQUAL:
            return 0.5, 0.5


@torch.no_grad()
def merge_gradients_(
    task: Gradients, ret: Gradients, *, projection: float, merge: Merge, lam: float
) -> list[Tensor | None]:
    """Compute a (task - projection ret) + b ret in place, with (a, b) the weights of the merge.

    The result lives in the task tensors, and in the retention tensor of a parameter that only
    retention reaches.
    """
    task_weight, ret_weight = merge_weights(merge, lam)
    fused_weight = ret_weight - task_weight * projection
    pairs = list(zip(task, ret, strict=True))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    only_ret = [b for a, b in pairs if a is None and b is not None]
    task_tensors = [a for a, _ in pairs if a is not None]
    if task_tensors and task_weight != 1.0:
        torch._foreach_mul_(task_tensors, task_weight)
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both], alpha=fused_weight)
    if only_ret:
        torch._foreach_mul_(only_ret, fused_weight)
    return [a if a is not None else b for a, b in pairs]


def _pieces(gradient: Tensor) -> Iterator[Tensor]:
    """Walk over a gradient in flat pieces of at least float32."""
    flat = gradient.detach().reshape(-1)
    wide = flat.dtype in (torch.float32, torch.float64)
    # Lazy, so that only one widened piece exists at a time.
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        yield piece if wide else piece.float()
