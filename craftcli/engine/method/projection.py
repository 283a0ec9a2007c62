"""The projection rule: remove from the task gradient what undoes retention, then merge the two.

With g_task and g_ret, the gradients of L_task and L_ret over one group of parameters:

    dot = <g_task, g_ret>        cos = dot / (|g_task| |g_ret|)
    if project and               g_task <- g_task - c g_ret,  c = dot / |g_ret|²   (project)
       cos < threshold:
    always:                      g = a g_task + b g_ret                            (merge)

The merge decides a and b: 1 and λ (weighted), 1 and min(λ, 1) (task_priority), ½ and ½ (equal).
After a projection <g_task, g_ret> = 0: to first order, the task step leaves L_ret where it is.

Condition: `project` says whether to project at all. With `--project-when violated`, the default,
it is L_ret > ε (engine/retention/retention.py). The threshold is a cosine, so that the size of
the gradients does not matter. At 0 every conflict counts; below 0 only those that undo retention
clearly. A zero gradient never conflicts.

At threshold 0 this is the projection of PCGrad (Yu et al., Gradient Surgery for Multi-Task
Learning, 2020, arXiv 2001.06782), for the task gradient only, and that of A-GEM (Chaudhry et al.,
Efficient Lifelong Learning with A-GEM, 2019, arXiv 1812.00420), with g_ret as its reference.

Both steps are one sum, g = a g_task + (b - a c) g_ret, so no third copy of the gradients is made.
Where nothing is projected, g is the gradient of a L_task + b L_ret, and one backward pass computes
it (`Retention.join`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from craftcli.choices import Merge
from craftcli.engine.method.gradients import (
    Gradients,
    Products,
    Reduce,
    Weights,
    inner_products,
    weighted_sum_,
)
from craftcli.engine.method.torchjd_weights import torchjd_weights


def project_and_merge_(
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
) -> tuple[list[Tensor | None], "ProjectionReport"]:
    """Project the task gradient where it conflicts, and merge the two, in place.

    Overwrites both gradients and allocates nothing of their size. Each group of parameters decides
    for itself. `groups`, `reduce` and `scale` are those of `inner_products`.
    """
    products = inner_products(task, ret, groups=groups, reduce=reduce, scale=scale)
    return merge_known_(
        task,
        ret,
        products,
        threshold=threshold,
        project=project,
        merge=merge,
        lam=lam,
        groups=groups,
    )


def merge_known_(
    task: Gradients,
    ret: Gradients,
    products: Sequence[Products],
    *,
    threshold: float,
    project: bool,
    merge: Merge,
    lam: float,
    groups: Sequence[int] | None = None,
) -> tuple[list[Tensor | None], "ProjectionReport"]:
    """`project_and_merge_` for gradients whose inner products are known."""
    weights = [
        merge_weights(p, threshold=threshold, project=project, merge=merge, lam=lam)
        for p in products
    ]
    merged = weighted_sum_(task, ret, weights, groups=groups)
    return merged, _report(products, threshold)


def projection_coefficient(products: Products, threshold: float) -> float:
    """The c of the rule: how much of g_ret to subtract from g_task; 0 without a conflict."""
    return products.dot / products.ret_sq if products.conflict(threshold) else 0.0


def merge_weights(
    products: Products, *, threshold: float, project: bool, merge: Merge, lam: float
) -> Weights:
    """The weights a and b - a c of the rule.

    TorchJD's merges resolve the conflict themselves, so nothing is projected for them. They see the
    retention gradient multiplied by λ, so that the budget still acts on them.
    """
    if merge.replaces_projection:
        task, ret = torchjd_weights(merge, products.scale_retention(lam))
        return Weights(task, ret * lam)
    c = projection_coefficient(products, threshold) if project else 0.0
    plain = plain_weights(merge, lam)
    return Weights(plain.task, plain.ret - plain.task * c)


def plain_weights(merge: Merge, lam: float) -> Weights:
    """The weights a and b of the rule, where nothing is projected."""
    match merge:
        case Merge.WEIGHTED:
            return Weights(1.0, lam)
        case Merge.TASK_PRIORITY:
            return Weights(1.0, min(lam, 1.0))
        case Merge.EQUAL:
            return Weights(0.5, 0.5)
        case _:
            raise ValueError(f"the weights of {merge} depend on the gradients")


@dataclass(frozen=True)
class ProjectionReport:
    """The two gradients before anything changed; all but the share is over all parameters."""

    dot: float
    cos: float
    task_norm: float
    ret_norm: float
    conflict_share: float
    """Share of conflicting groups among those that both losses reach; 0 or 1 with one group."""

    @property
    def conflict(self) -> bool:
        """Whether any group conflicts."""
        return self.conflict_share > 0


def _report(products: Sequence[Products], threshold: float) -> ProjectionReport:
    total = sum(products, Products(0.0, 0.0, 0.0))
    reached = [p for p in products if p.reached]
    return ProjectionReport(
        dot=total.dot,
        cos=total.cos,
        task_norm=math.sqrt(total.task_sq),
        ret_norm=math.sqrt(total.ret_sq),
        conflict_share=sum(p.conflict(threshold) for p in reached) / max(len(reached), 1),
    )
