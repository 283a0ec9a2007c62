"""Processed batches for the tiny vision-language policies, made by hand."""

from collections.abc import Iterable
from typing import Any

import torch
from lerobot.utils.constants import (
    ACTION,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
    OBS_STATE,
)

from tiny.world import ACTIONS, CAMERAS, PX, STATE

ROWS = 3
SEEDS = (1, 2, 3)
LENGTHS = (4, 7, 5)
"""Tokens of the prompts; the rest is padding."""


def processed(policy: Any, *, cameras: Iterable[str] = CAMERAS) -> dict[str, Any]:
    """A batch in the form of a preprocessor's result, with random numbers."""
    chance = torch.Generator().manual_seed(3)
    length = policy.config.tokenizer_max_length
    tokens = torch.randint(10, 40, (ROWS, length), generator=chance)
    mask = torch.arange(length) < torch.tensor(LENGTHS)[:, None]
    return {
        **{key: torch.rand(ROWS, 3, PX, PX, generator=chance) for key in cameras},
        OBS_STATE: torch.rand(ROWS, STATE, generator=chance),
        OBS_LANGUAGE_TOKENS: tokens * mask,
        OBS_LANGUAGE_ATTENTION_MASK: mask,
        ACTION: torch.rand(ROWS, policy.config.chunk_size, ACTIONS, generator=chance),
    }


def with_other_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """The same batch with other tokens where there is padding."""
    mask = batch[OBS_LANGUAGE_ATTENTION_MASK]
    return {**batch, OBS_LANGUAGE_TOKENS: torch.where(mask, batch[OBS_LANGUAGE_TOKENS], 9)}


def model_inputs(policy: Any, batch: dict[str, Any]) -> list[Any]:
    """What the models of pi0, pi05 and smolvla take before the actions."""
    preprocess = getattr(policy, "_preprocess_images", None) or policy.prepare_images
    state = [policy.prepare_state(batch)] if hasattr(policy, "prepare_state") else []
    images, masks = preprocess(batch)
    language = (batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK])
    return [images, masks, *language, *state]
