"""Gradient surgery: take out of the task gradient what works against retention, then merge."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from craftcli.choices import Merge
from craftcli.engine.products import Gradients, Products, Reduce, inner_products, local_shard
from craftcli.engine.weighting import torchjd_weights


@dataclass(frozen=True)
class SurgeryReport:
    """What one operation saw, before it changed anything; all but the share is over everything."""

    dot: float
    cos: float
    task_norm: float
    ret_norm: float
    conflict_share: float
    """Of the groups that both losses reach, how many conflict; one group makes it 0 or 1."""

    @property
    def conflict(self) -> bool:
        """Whether any group conflicts."""
        return self.conflict_share > 0


@dataclass(frozen=True)
class MergeWeights:
    """What the task and the retention gradient are multiplied with before they are added."""

    task: float
    ret: float


def operate_(
    task: Gradients,
    ret: Gradients,
    *,
    threshold: float,
    project: bool,
    merge: Merge,
    lam: float,
    groups: Sequence[int] | None = None,
    reduce: Reduce | None = None,
    scale: float = 1.0,
) -> tuple[list[Tensor | None], SurgeryReport]:
    """Project the task gradient where it conflicts, and merge the two, in place.

    Both are used up, and nothing of their size is allocated. Each group of parameters decides for
    itself; `groups`, `reduce` and `scale` are those of `inner_products`.
    """
    products = inner_products(task, ret, groups=groups, reduce=reduce, scale=scale)
    weights = [
        merge_weights(p, threshold=threshold, project=project, merge=merge, lam=lam)
        for p in products
    ]
    merged = merge_gradients_(task, ret, weights, groups=groups)
    return merged, _report(products, threshold)


def projection_coefficient(products: Products, threshold: float) -> float:
    """How much of the retention gradient to take out of the task gradient; 0 without conflict.

    The threshold is a cosine, so the decision does not depend on the size of the gradients.
    """
    return products.dot / products.ret_sq if products.conflict(threshold) else 0.0


def merge_weights(
    products: Products, *, threshold: float, project: bool, merge: Merge, lam: float
) -> MergeWeights:
    """The weights of the merge, with the projection taken off the retention gradient's.

    TorchJD's weightings settle the conflict themselves, so nothing is projected for them; they see
    the retention gradient multiplied by λ, so that the budget keeps its say.
    """
    projection = projection_coefficient(products, threshold) if project else 0.0
    match merge:
        case Merge.WEIGHTED:
            return MergeWeights(1.0, lam - projection)
        case Merge.TASK_PRIORITY:
            return MergeWeights(1.0, min(lam, 1.0) - projection)
        case Merge.EQUAL:
            return MergeWeights(0.5, 0.5 - 0.5 * projection)
        case _:
            task, ret = torchjd_weights(merge, products.scale_retention(lam))
            return MergeWeights(task, ret * lam)


@torch.no_grad()
def merge_gradients_(
    task: Gradients,
    ret: Gradients,
    weights: Sequence[MergeWeights],
    *,
    groups: Sequence[int] | None = None,
) -> list[Tensor | None]:
    """Compute the weighted sum of the two in place, with the weights of each parameter's group.

    The result lives in the task tensors, and in the retention tensor of a parameter that only
    retention reaches.
    """
    numbers = [0] * len(task) if groups is None else groups
    members: list[list[tuple[Tensor | None, Tensor | None]]] = [[] for _ in weights]
    for g_task, g_ret, number in zip(task, ret, numbers, strict=True):
        members[number].append((g_task, g_ret))
    for pairs, weight in zip(members, weights, strict=True):
        _merge_group_(pairs, weight)
    return [a if a is not None else b for a, b in zip(task, ret, strict=True)]


def _merge_group_(pairs: list[tuple[Tensor | None, Tensor | None]], weight: MergeWeights) -> None:
    task = [local_shard(a) for a, _ in pairs if a is not None]
    both = [(local_shard(a), local_shard(b)) for a, b in pairs if a is not None and b is not None]
    only_ret = [local_shard(b) for a, b in pairs if a is None and b is not None]
    if task and weight.task != 1.0:
        torch._foreach_mul_(task, weight.task)
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both], alpha=weight.ret)
    if only_ret:
        torch._foreach_mul_(only_ret, weight.ret)


def _report(products: list[Products], threshold: float) -> SurgeryReport:
    total = sum(products, Products(0.0, 0.0, 0.0))
    reached = [p for p in products if p.reached]
    return SurgeryReport(
        dot=total.dot,
        cos=total.cos,
        task_norm=math.sqrt(total.task_sq),
        ret_norm=math.sqrt(total.ret_sq),
        conflict_share=sum(p.conflict(threshold) for p in reached) / max(len(reached), 1),
    )
