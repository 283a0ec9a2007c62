"""A pi0_fast policy of some 100 000 parameters, with tokenizers for what the tiny world does."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.policies.pi0_fast.processor_pi0_fast import make_pi0_fast_pre_post_processors
from torch import Tensor

from craftcli.demo.tokenizers import (
    VOCAB_SIZE,
    build_action_tokenizer,
    build_text_tokenizer,
    register_action_tokenizer,
    tokenizer_folders,
)
from tiny.configuration_tiny_pi import SmallPI0FastConfig
from tiny.family import Family, hooked, own_forward
from tiny.modeling_tiny_pi import SmallPI0FastPolicy
from tiny.paligemma import pi_settings
from tiny.world import ACTIONS, TASKS, stats

CHUNK = 4
MAX_TOKENS = 20

register_action_tokenizer()


def make(folder: Path) -> Path:
    made = policy(write_tokenizers(folder))
    made.save_pretrained(folder)
    for processor in make_pi0_fast_pre_post_processors(made.config, dataset_stats=stats()):
        processor.save_pretrained(folder)
    return folder


def policy(tokenizers: Path, **settings: Any) -> SmallPI0FastPolicy:
    """A policy whose tokenizers are in that folder."""
    text, action = tokenizer_folders(tokenizers)
    fast = {
        "vocab_size": VOCAB_SIZE,
        "text_tokenizer_name": str(text),
        "action_tokenizer_name": str(action),
        "fast_skip_tokens": 0,
        "max_action_tokens": MAX_TOKENS,
        "max_decoding_steps": MAX_TOKENS,
        "validate_action_token_prefix": False,  # weights at random decode anything
    }
    common = pi_settings(**{"chunk_size": CHUNK, "n_action_steps": CHUNK, **settings})
    del common["num_inference_steps"]  # it samples tokens, in no such steps
    torch.manual_seed(0)
    return SmallPI0FastPolicy(SmallPI0FastConfig(**{**fast, **common}))


def write_tokenizers(folder: Path) -> Path:
    """Words of the tasks, and a FAST tokenizer with merges: chunks differ in their length."""
    text, action = tokenizer_folders(folder)
    build_text_tokenizer([word for task in TASKS for word in task.split()]).save_pretrained(text)
    chunks = np.random.default_rng(0).uniform(-1.7, 1.7, (400, CHUNK, ACTIONS))
    build_action_tokenizer(chunks, scale=2.0, vocab_size=60).save_pretrained(action)
    return folder


def _reference(policy: Any, batch: dict[str, Any], _stack: str) -> dict[int, Tensor]:
    names = [f"{_LANGUAGE}.layers.{i}" for i in range(policy.config.depth)]
    return hooked(policy, names, own_forward(policy, batch))


_MODEL = "model.paligemma_with_expert.paligemma.model"
_LANGUAGE = f"{_MODEL}.language_model"
PI0_FAST = Family(
    name="pi0_fast",
    make=make,
    reference=_reference,
    reached={
        "vlm": (
            f"{_MODEL}.vision_tower",
            f"{_MODEL}.multi_modal_projector",
            f"{_LANGUAGE}.embed_tokens",
            f"{_LANGUAGE}.layers",
        )
    },
    untouched={"vlm": (f"{_LANGUAGE}.norm", "model.paligemma_with_expert.paligemma.lm_head")},
)
