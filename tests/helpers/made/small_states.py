"""A policy of states alone and its data, small enough to be kept as files."""

from pathlib import Path

import torch
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from tiny.robots import spread, write_robot_data
from tiny.world import ACTIONS, ENV, STATE, input_features, output_features, save

FRAMES = 16
_SIZES = {"observation.state": STATE, "observation.environment_state": ENV, "action": ACTIONS}


def write_policy(folder: Path) -> Path:
    """ACT with one layer of each kind."""
    torch.manual_seed(0)
    config = ACTConfig(
        device="cpu",
        push_to_hub=False,
        input_features=input_features(cameras=0, env=True),
        output_features=output_features(),
        pretrained_backbone_weights=None,
        chunk_size=4,
        n_action_steps=4,
        dim_model=8,
        n_heads=2,
        dim_feedforward=8,
        n_encoder_layers=1,
        n_decoder_layers=1,
        n_vae_encoder_layers=1,
        latent_dim=4,
    )
    return save(folder, ACTPolicy(config))


def write_data(folder: Path, *, seed: int) -> Path:
    """A dataset of one episode with random numbers."""
    vectors = {
        name: spread(FRAMES, size, seed=seed + number)
        for number, (name, size) in enumerate(_SIZES.items())
    }
    return write_robot_data(folder, vectors)
