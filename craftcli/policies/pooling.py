"""Pooling: which tokens of the hidden states are kept, and how they become vectors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from craftcli.choices import Pooling

_REQUIRED: dict[Pooling, frozenset[str]] = {
    Pooling.MEAN_IMAGE_TOKENS: frozenset({"image"}),
    Pooling.VISION_TEXT: frozenset({"image", "text"}),
    Pooling.MEAN_ACTION_TOKENS: frozenset({"action"}),
    Pooling.ACTION_TOKENS: frozenset({"action"}),
}


# Tensors have no truth value, so a generated __eq__ would raise.
@dataclass(frozen=True, kw_only=True, eq=False)
class TokenMasks:
    """The kind of each token in a batch of sequences; padding is False in every mask."""

    image: Tensor
    """[B, S] bool: image tokens of cameras that are present."""
    text: Tensor
    """[B, S] bool: text tokens, and state tokens if the policy has any."""
    action: Tensor
    """[B, S] bool: action tokens."""
    action_span: tuple[int, int] = (0, 0)
    """The positions (start, stop) that can hold action tokens, the same for every batch."""

    @property
    def prefix(self) -> Tensor:
        """The tokens that the policy conditions on: image and text."""
        return self.image | self.text


@dataclass(frozen=True, eq=False)
class Pooled:
    """The pooled vectors of a batch, and which of them exist."""

    vectors: Tensor
    """[B, V, D] float32, zeros where `mask` is False."""
    mask: Tensor
    """[B, V] bool."""


def required_tokens(pooling: Pooling) -> frozenset[str]:
    """The kinds of token (image, text, action) that this pooling needs."""
    return _REQUIRED.get(pooling, frozenset())


def needs_action_tokens(pooling: Pooling) -> bool:
    """Whether the policy must run over action tokens for this pooling."""
    return "action" in required_tokens(pooling)


def pool(hidden: Tensor, masks: TokenMasks, pooling: Pooling) -> Pooled:
    """Pool hidden states [B, S, D] into vectors [B, V, D], in float32.

    The content of tokens outside the masks, NaN included, never reaches the result; a NaN in a
    valid token always does. A row without a token of the needed kind is zeros with mask False.
    """
    _check_shapes(hidden, masks)
    match pooling:
        case Pooling.MEAN_IMAGE_TOKENS:
            return _mean(hidden, masks.image)
        case Pooling.MEAN_MASKED:
            return _mean(hidden, masks.prefix)
        case Pooling.LAST_TOKEN:
            return _last(hidden, masks.prefix)
        case Pooling.CLS_TOKEN:
            return _first(hidden, masks.prefix)
        case Pooling.VISION_TEXT:
            image, text = _mean(hidden, masks.image), _last(hidden, masks.text)
            return Pooled(
                torch.cat([image.vectors, text.vectors], dim=1),
                torch.cat([image.mask, text.mask], dim=1),
            )
        case Pooling.MEAN_ACTION_TOKENS:
            return _mean(hidden, masks.action)
        case Pooling.ACTION_TOKENS:
            segment = slice(*masks.action_span)
            return _keep(hidden[:, segment].float(), masks.action[:, segment])


def _check_shapes(hidden: Tensor, masks: TokenMasks) -> None:
    # A mask of another length would broadcast without an error.
    for name, mask in (("image", masks.image), ("text", masks.text), ("action", masks.action)):
        if mask.shape != hidden.shape[:2] or mask.dtype != torch.bool:
            raise ValueError(
                f"{name} mask must be bool of shape {tuple(hidden.shape[:2])}, "
                f"got {mask.dtype} of shape {tuple(mask.shape)}"
            )
    start, stop = masks.action_span
    if not 0 <= start <= stop <= hidden.shape[1]:
        raise ValueError(f"action_span {masks.action_span} is not within 0..{hidden.shape[1]}")


def _keep(vectors: Tensor, mask: Tensor) -> Pooled:
    # where, not multiply: 0 * NaN is NaN, in the value and in the gradient.
    return Pooled(torch.where(mask.unsqueeze(-1), vectors, 0.0), mask)


def _mean(hidden: Tensor, mask: Tensor) -> Pooled:
    total = torch.where(mask.unsqueeze(-1), hidden, 0.0).sum(1, keepdim=True, dtype=torch.float32)
    count = mask.sum(1, keepdim=True)
    return Pooled(total / count.clamp(min=1).unsqueeze(-1), count > 0)


def _last(hidden: Tensor, mask: Tensor) -> Pooled:
    positions = torch.arange(mask.shape[1], device=mask.device)
    return _pick(hidden, mask, torch.where(mask, positions, 0).amax(1))


def _first(hidden: Tensor, mask: Tensor) -> Pooled:
    length = mask.shape[1]
    positions = torch.arange(length, device=mask.device)
    return _pick(hidden, mask, torch.where(mask, positions, length - 1).amin(1))


def _pick(hidden: Tensor, mask: Tensor, index: Tensor) -> Pooled:
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    return _keep(hidden[rows, index].float().unsqueeze(1), mask.any(1, keepdim=True))
