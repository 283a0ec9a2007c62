"""Retention losses: the distance of the student's vectors or tokens from the teacher's.

Every loss is a float32 scalar, the mean over the rows of a batch, and carries the gradient.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from craftcli.choices import IGNORED_LABEL, LossKind

# Squared length below which the direction of a vector is noise.
_COSINE_EPS = 1e-12


@dataclass(frozen=True, eq=False)
class RetentionLoss:
    """The retention loss of one anchor batch."""

    total: Tensor
    """Scalar, the mean over the layers; carries the gradient."""
    per_layer: dict[str, Tensor]
    """One detached scalar per layer."""


def retention_loss(
    student: Mapping[str, Tensor],
    teacher: Mapping[str, Tensor],
    mask: Tensor,
    kind: LossKind,
    variances: Mapping[str, Tensor | float],
    weights: Tensor | None = None,
) -> RetentionLoss:
    """The mean of `layer_loss` over layers of vectors [B, V, D] with one mask [B, V].

    Only nmse reads `variances`, which must then name the same layers.
    """
    _check_layers(student, teacher, "teacher")
    if kind is LossKind.NMSE:
        _check_layers(student, variances, "variances")
    losses = {
        name: layer_loss(vectors, teacher[name], mask, kind, variances.get(name), weights)
        for name, vectors in student.items()
    }
    total = torch.stack(list(losses.values())).mean()
    return RetentionLoss(total, {name: loss.detach() for name, loss in losses.items()})


def layer_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    kind: LossKind,
    variance: Tensor | float | None,
    weights: Tensor | None = None,
) -> Tensor:
    """The distance of vectors [B, V, D] where mask [B, V] is True.

    A row counts with the mean over its valid vectors, and with 0 if it has none: the loss of a
    batch is then the mean of the losses of its parts. nmse divides by `variance`, the mean variance
    of the teacher's features, one or one for each row [B]: 0.02 means that the vectors moved by
    2 % of it. `weights` [B] say how much each row counts; without them all count alike.
    """
    if student.shape != teacher.shape or mask.shape != student.shape[:-1]:
        raise ValueError(
            f"shapes do not match: student {tuple(student.shape)}, "
            f"teacher {tuple(teacher.shape)}, mask {tuple(mask.shape)}"
        )
    # Upcast first: the difference of two nearly equal bfloat16 numbers is mostly rounding. Select
    # with where instead of a product: a NaN in the padding must stay out of the gradient.
    valid = mask.unsqueeze(-1)
    ours = torch.where(valid, student.float(), 0.0)
    theirs = torch.where(valid, teacher.float(), 0.0)
    match kind:
        case LossKind.MSE:
            errors = _row_means((ours - theirs).square().mean(-1), mask)
        case LossKind.NMSE:
            errors = _row_means((ours - theirs).square().mean(-1), mask)
            errors = errors / _checked_variance(variance, len(errors))
        case LossKind.L1:
            errors = _row_means((ours - theirs).abs().mean(-1), mask)
        case LossKind.COSINE:
            errors = _row_means(1.0 - _cosine(ours, theirs), mask)
    return (errors if weights is None else weights * errors).mean()


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average values [B, V] where mask [B, V] is True (0 in an empty row), then over the rows."""
    return _row_means(values, mask).mean()


def _row_means(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    # Both vectors get one more tiny, equal component: two zero vectors then agree, and the square
    # roots stay away from 0, where their gradient is infinite.
    a_norm = (a.square().sum(-1) + _COSINE_EPS).sqrt()
    b_norm = (b.square().sum(-1) + _COSINE_EPS).sqrt()
    return ((a * b).sum(-1) + _COSINE_EPS) / (a_norm * b_norm)


def _checked_variance(variance: Tensor | float | None, rows: int) -> Tensor | float:
    # The numbers of a tensor are checked where they are made: reading them in every step would make
    # a GPU wait.
    if isinstance(variance, Tensor):
        if variance.shape != (rows,):
            raise ValueError(f"nmse needs a variance for each of {rows} rows, got {variance.shape}")
    elif variance is None or not 0 < variance < math.inf:
        raise ValueError(f"nmse needs a positive teacher variance, got {variance}")
    return variance


def _check_layers(student: Mapping[str, Tensor], other: Mapping[str, object], name: str) -> None:
    if not student or student.keys() != other.keys():
        raise ValueError(f"layers differ: student {sorted(student)}, {name} {sorted(other)}")


# Smallest probability of the tokens outside the top k: keeps the logarithm finite.
_REST = 1e-12


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [B, S, V] at labels [B, S]: mean over tokens, then over rows."""
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten().long(), reduction="none"
    )
    return row_mean(losses.view(labels.shape), labels != IGNORED_LABEL)


def top_k_divergence(
    logits: Tensor, top_tokens: Tensor, top_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """KL divergence of the student's token distribution from the teacher's top k [B, S, K].

    All tokens outside the top k count as one. The result is 0 where student and teacher agree on
    the top k, and a lower bound of the full divergence.
    """
    student = torch.log_softmax(logits.float(), dim=-1).gather(-1, top_tokens.long())
    teacher = top_logprobs.float()
    rest_student, rest_teacher = _rest(student), _rest(teacher)
    kept = (teacher.exp() * (teacher - student)).sum(-1)
    others = rest_teacher * (rest_teacher.log() - rest_student.log())
    return row_mean(kept + others, mask)


def _rest(logprobs: Tensor) -> Tensor:
    return (1.0 - logprobs.exp().sum(-1)).clamp(min=_REST)
