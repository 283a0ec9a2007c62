"""How far the student's token predictions have moved from the teacher's."""

import torch
from torch import Tensor
from torch.nn import functional

from craftcli.cache.format import IGNORED_LABEL
from craftcli.engine.losses import row_mean

# Probability below which the tokens that were not kept do not count.
_REST = 1e-12


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [B, S, V] at labels [B, S], the mean over rows of their tokens'."""
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten().long(), reduction="none"
    )
    return row_mean(losses.view(labels.shape), labels != IGNORED_LABEL)


def top_k_divergence(
    logits: Tensor, top_tokens: Tensor, top_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """KL of the student's tokens from the teacher's, its likeliest ones [B, S, K] and all others.

    The tokens that were not kept count as one: the divergence is 0 where the two agree on the kept
    ones, and is a lower bound of the whole.
    """
    student = torch.log_softmax(logits.float(), dim=-1).gather(-1, top_tokens.long())
    teacher = top_logprobs.float()
    rest_student, rest_teacher = _rest(student), _rest(teacher)
    kept = (teacher.exp() * (teacher - student)).sum(-1)
    others = rest_teacher * (rest_teacher.log() - rest_student.log())
    return row_mean(kept + others, mask)


def _rest(logprobs: Tensor) -> Tensor:
    return (1.0 - logprobs.exp().sum(-1)).clamp(min=_REST)
