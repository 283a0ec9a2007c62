"""ACT: with two cameras, and with states alone."""

from pathlib import Path
from typing import Any

import torch
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from torch import Tensor

from tiny.family import Family, hooked, own_forward
from tiny.world import CAMERAS, input_features, output_features, save

CHUNK = 4


def policy(
    *, cameras: int, px: int = 64, chunk: int = CHUNK, width: int = 32, **settings: Any
) -> ACTPolicy:
    torch.manual_seed(0)
    return ACTPolicy(
        ACTConfig(
            device="cpu",
            push_to_hub=False,
            input_features=input_features(cameras=cameras, px=px, env=not cameras),
            output_features=output_features(),
            pretrained_backbone_weights=None,
            chunk_size=chunk,
            n_action_steps=chunk,
            dim_model=width,
            n_heads=4,
            dim_feedforward=2 * width,
            n_encoder_layers=2,
            n_decoder_layers=2,
            n_vae_encoder_layers=1,
            latent_dim=8,
            **settings,
        )
    )


def make(folder: Path) -> Path:
    return save(folder, policy(cameras=2))


def make_state_only(folder: Path) -> Path:
    return save(folder, policy(cameras=0))


def _reference(policy: Any, batch: dict[str, Any], stack: str) -> dict[int, Tensor]:
    names = [f"model.{stack}.layers.{i}" for i in range(2)]
    seen = hooked(policy, names, own_forward(policy, batch))
    return {layer: states.transpose(0, 1) for layer, states in seen.items()}


_REACHED = {
    "encoder": ("model.encoder.layers", "model.encoder_robot_state_input_proj"),
    "decoder": ("model.encoder.layers", "model.decoder.layers", "model.decoder_pos_embed"),
}
_UNTOUCHED = {
    "encoder": ("model.decoder", "model.action_head", "model.vae_encoder"),
    "decoder": ("model.decoder.norm", "model.action_head", "model.vae_encoder"),
}

ACT = Family(
    name="act",
    make=make,
    reference=_reference,
    reached={stack: (*names, "model.backbone") for stack, names in _REACHED.items()},
    untouched=_UNTOUCHED,
    camera=CAMERAS[1],
)
STATE_ONLY = Family(
    name="act-state-only",
    make=make_state_only,
    reference=_reference,
    reached=_REACHED,
    untouched=_UNTOUCHED,
)
