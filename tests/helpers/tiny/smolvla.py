"""A smolvla of some 100 000 parameters: LeRobot's own class over a small SmolVLM made on disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from torch import Tensor
from transformers import (
    LlamaConfig,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from tiny.family import Family, own_forward
from tiny.residuals import draw, layer_outputs
from tiny.words import text_tokenizer
from tiny.world import input_features, output_features, save

PATCH_PX = 8
SCALE = 2
"""Patches to a side that become one token."""
MARKERS = {
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "image_token": "<image>",
}


def make(folder: Path) -> Path:
    return save(folder, policy(write_vlm(folder.parent / f"{folder.name}-vlm")))


def policy(vlm: Path, *, cameras: int = 2, px: int = 32, **settings: Any) -> SmolVLAPolicy:
    torch.manual_seed(0)
    return SmolVLAPolicy(
        SmolVLAConfig(
            **{
                "device": "cpu",
                "push_to_hub": False,
                "input_features": input_features(cameras=cameras),
                "output_features": output_features(),
                "vlm_model_name": str(vlm),
                "load_vlm_weights": False,
                "num_vlm_layers": 4,
                "chunk_size": 4,
                "n_action_steps": 4,
                "max_state_dim": 6,
                "max_action_dim": 5,
                "num_steps": 3,
                "tokenizer_max_length": 12,
                "empty_cameras": 1,
                "resize_imgs_with_padding": (px, px),
                **settings,
            }
        )
    )


def write_vlm(
    folder: Path,
    *,
    width: int = 32,
    text: Mapping[str, int] | None = None,
    vision: Mapping[str, int] | None = None,
    scale: int = SCALE,
) -> Path:
    """What smolvla takes of a SmolVLM on disk: its sizes and its processor.

    `text` and `vision` replace the sizes of the two models.
    """
    tokenizer = text_tokenizer(**MARKERS)
    small_text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": width * 3 // 2,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": 256,
    }
    small_vision = {
        "hidden_size": width,
        "intermediate_size": width * 3 // 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": PATCH_PX,
    }
    language = LlamaConfig(
        **{**small_text, **(text or {})},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    SmolVLMConfig(
        text_config=language.to_dict(),
        vision_config={**small_vision, **(vision or {})},
        scale_factor=scale,
        image_token_id=tokenizer.convert_tokens_to_ids(MARKERS["image_token"]),
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)
    SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(),
    ).save_pretrained(folder)
    return folder


def _reference(policy: Any, batch: dict[str, Any], stack: str) -> dict[int, Tensor]:
    model = policy.model.vlm_with_expert
    layers = {"vlm": model.get_vlm_model().text_model.layers, "expert": model.lm_expert.layers}
    return layer_outputs(layers[stack], own_forward(policy, batch))


_MODEL = "model.vlm_with_expert"
SMOLVLA = Family(
    name="smolvla",
    make=make,
    reference=_reference,
    draw=draw,
    alone=("vlm",),
    # LeRobot trains the expert and the state's projection alone, by default.
    reached={
        "vlm": ("model.state_proj",),
        "expert": ("model.state_proj", "model.action_", f"{_MODEL}.lm_expert.layers"),
    },
    untouched={
        "vlm": (f"{_MODEL}.lm_expert", f"{_MODEL}.vlm", "model.action_"),
        "expert": (f"{_MODEL}.lm_expert.norm", f"{_MODEL}.vlm", "model.action_out_proj"),
    },
)
