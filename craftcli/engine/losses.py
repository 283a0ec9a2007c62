"""How far the student's hidden states have moved from the teacher's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from craftcli.choices import LossKind

# Squared length below which a vector has no direction worth comparing.
_COSINE_EPS = 1e-12


@dataclass(frozen=True, eq=False)
class RetentionLoss:
    """The retention loss of one anchor batch."""

    total: Tensor
    """Scalar, the mean over the layers; carries the gradient."""
    per_layer: dict[str, Tensor]
    """One detached scalar a layer."""


def retention_loss(
    student: Mapping[str, Tensor],
    teacher: Mapping[str, Tensor],
    mask: Tensor,
    kind: LossKind,
    variances: Mapping[str, float],
) -> RetentionLoss:
    """Compare every layer [B, V, D] where mask [B, V] is True; the layers weigh the same.

    `variances` is read for nmse only, and then has to name the same layers.
    """
    _check_layers(student, teacher, "teacher")
    if kind is LossKind.NMSE:
        _check_layers(student, variances, "variances")
    losses = {
        name: layer_loss(vectors, teacher[name], mask, kind, variances.get(name))
        for name, vectors in student.items()
    }
    total = torch.stack(list(losses.values())).mean()
    return RetentionLoss(total, {name: loss.detach() for name, loss in losses.items()})


def layer_loss(
    student: Tensor, teacher: Tensor, mask: Tensor, kind: LossKind, variance: float | None
) -> Tensor:
    """Compare vectors [B, V, D] where mask [B, V] is True: a float32 scalar, the mean over rows.

    A row counts with the mean over its valid vectors, and with 0 when it has none, so that the loss
    of a batch is the mean of the losses of its parts. `variance` is the mean variance of the
    teacher's features and scales nmse: 0.02 then says that the vectors moved by 2 % of it.
    """
    if student.shape != teacher.shape or mask.shape != student.shape[:-1]:
        raise ValueError(
            f"shapes do not match: student {tuple(student.shape)}, "
            f"teacher {tuple(teacher.shape)}, mask {tuple(mask.shape)}"
        )
    # Upcast first: the difference of two nearly equal bfloat16 numbers is mostly rounding. Then
    # where, not multiply: whatever padding holds, NaN included, must stay out of the gradient.
    valid = mask.unsqueeze(-1)
    ours = torch.where(valid, student.float(), 0.0)
    theirs = torch.where(valid, teacher.float(), 0.0)
    match kind:
        case LossKind.MSE:
            return row_mean((ours - theirs).square().mean(-1), mask)
        case LossKind.NMSE:
            scale = _checked_variance(variance)
            return row_mean((ours - theirs).square().mean(-1), mask) / scale
        case LossKind.L1:
            return row_mean((ours - theirs).abs().mean(-1), mask)
        case LossKind.COSINE:
            return row_mean(1.0 - _cosine(ours, theirs), mask)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over rows of values [B, V] averaged where mask [B, V] is True, 0 without any."""
    total = torch.where(mask, values, 0.0).sum(1)
    return (total / mask.sum(1).clamp(min=1)).mean()


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    # The cosine after giving both vectors one more, tiny, equal component: two zero vectors agree,
    # and the square roots stay clear of 0, where their gradient is infinite.
    a_norm = (a.square().sum(-1) + _COSINE_EPS).sqrt()
    b_norm = (b.square().sum(-1) + _COSINE_EPS).sqrt()
    return ((a * b).sum(-1) + _COSINE_EPS) / (a_norm * b_norm)


def _checked_variance(variance: float | None) -> float:
    if variance is None or not 0 < variance < math.inf:
        raise ValueError(f"nmse needs a positive teacher variance, got {variance}")
    return variance


def _check_layers(student: Mapping[str, Tensor], other: Mapping[str, object], name: str) -> None:
    if not student or student.keys() != other.keys():
        raise ValueError(f"layers differ: student {sorted(student)}, {name} {sorted(other)}")
