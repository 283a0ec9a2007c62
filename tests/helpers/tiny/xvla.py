"""An xvla of some 300 000 parameters, its Florence-2 small in every width."""

from pathlib import Path
from typing import Any

import torch
from lerobot.policies.xvla.configuration_xvla import XVLAConfig
from lerobot.policies.xvla.modeling_xvla import XVLAPolicy
from torch import Tensor

from craftcli.policies.base import NOISE, TIME
from tiny.family import SEED, Family, hooked, own_forward
from tiny.words import text_tokenizer
from tiny.world import input_features, output_features, save

CHUNK, DEPTH, ENCODER_DEPTH = 4, 3, 2


def make(folder: Path) -> Path:
    words = folder / "text_tokenizer"
    text_tokenizer().save_pretrained(words)
    return save(folder, policy(tokenizer_name=str(words)))


def policy(*, cameras: int = 2, px: int = 64, **settings: Any) -> XVLAPolicy:
    torch.manual_seed(0)
    return XVLAPolicy(
        XVLAConfig(
            **{
                "device": "cpu",
                "push_to_hub": False,
                "input_features": input_features(cameras=cameras),
                "output_features": output_features(),
                "florence_config": florence(),
                "tokenizer_max_length": 12,
                "resize_imgs_with_padding": (px, px),
                "empty_cameras": 1,
                "action_mode": "auto",
                "chunk_size": CHUNK,
                "n_action_steps": CHUNK,
                "max_state_dim": 6,
                "max_action_dim": 5,
                "hidden_size": 32,
                "depth": DEPTH,
                "num_heads": 4,
                "num_domains": 3,
                "len_soft_prompts": 2,
                "dim_time": 8,
                "num_denoising_steps": 3,
                **settings,
            }
        )
    )


def florence() -> dict[str, Any]:
    """A DaViT of two stages that leaves an 8th of each side, and a BART of two layers."""
    vision = {
        "depths": [1, 1],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "embed_dim": [16, 32],
        "num_heads": [2, 4],
        "num_groups": [2, 4],
        "window_size": 4,
        "projection_dim": 32,
        "max_position_embeddings": 16,
        "max_temporal_embeddings": 4,
    }
    text = {
        "vocab_size": len(text_tokenizer()),
        "d_model": 32,
        "encoder_layers": ENCODER_DEPTH,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": 1,
    }
    return {"vision_config": vision, "text_config": text}


def _reference(policy: Any, batch: dict[str, Any], stack: str) -> dict[int, Tensor]:
    names = {
        "vlm": [f"model.vlm.language_model.encoder.layers.{i}" for i in range(ENCODER_DEPTH)],
        "transformer": [f"model.transformer.blocks.{i}" for i in range(DEPTH)],
    }
    return hooked(policy, names[stack], own_forward(policy, batch))


def _draw(policy: Any, batch: dict[str, Any]) -> dict[str, Any]:
    rows = len(batch["action"])
    torch.manual_seed(SEED)
    time = (torch.rand(1) + torch.arange(rows) / rows) % (1 - 1e-5)
    return {TIME: time, NOISE: torch.randn(rows, CHUNK, policy.model.dim_action)}


_SEEN = ("model.vlm.vision_tower", "model.vlm.language_model.encoder.layers")
XVLA = Family(
    name="xvla",
    make=make,
    reference=_reference,
    draw=_draw,
    reached={
        "vlm": _SEEN,
        "transformer": (
            *_SEEN,
            "model.transformer.blocks",
            "model.transformer.soft_prompt_hub",
            "model.transformer.action_encoder",
            "model.transformer.aux_visual_proj",
        ),
    },
    untouched={
        "vlm": ("model.transformer",),
        "transformer": ("model.transformer.norm", "model.transformer.action_decoder"),
    },
)
