"""Fresh LeRobot policies, small enough to learn a Meta-World task on a CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.datasets.compute_stats import aggregate_stats
from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.policies.factory import make_pre_post_processors
from views import ACTION, ACTION_SIZE, STATE, WORLD, View

LEAST_SPREAD = 0.1
"""Coordinates that stand still in the old data move in the new: this is the least scale of one."""

_TYPES = {STATE: FeatureType.STATE, WORLD: FeatureType.ENV}
_OUTPUTS = {ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(ACTION_SIZE,))}


def act(inputs: dict[str, PolicyFeature]) -> ACTPolicy:
    """ACT over states: 16 actions at once, the first 8 are carried out, and no VAE."""
    return ACTPolicy(
        ACTConfig(
            device="cpu",
            push_to_hub=False,
            input_features=inputs,
            output_features=_OUTPUTS,
            pretrained_backbone_weights=None,
            chunk_size=16,
            n_action_steps=8,
            dim_model=96,
            n_heads=4,
            dim_feedforward=256,
            n_encoder_layers=3,
            n_decoder_layers=1,
            use_vae=False,
            dropout=0.1,
        )
    )


def diffusion(inputs: dict[str, PolicyFeature]) -> DiffusionPolicy:
    """A diffusion policy over states, with the chunks of the ACT and ten steps of denoising."""
    return DiffusionPolicy(
        DiffusionConfig(
            device="cpu",
            push_to_hub=False,
            input_features=inputs,
            output_features=_OUTPUTS,
            n_obs_steps=2,
            horizon=16,
            n_action_steps=8,
            drop_n_last_frames=7,
            down_dims=(64, 128),
            diffusion_step_embed_dim=64,
            noise_scheduler_type="DDIM",
            num_inference_steps=10,
        )
    )


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of policy, and what arms call by other names in each."""

    make: Callable[[dict[str, PolicyFeature]], Any]
    perception: str
    """The stack furthest from the action."""
    lora_targets: str
    rounds: tuple[tuple[int, float], ...]
    """Of the teacher's training: steps and learning rate."""
    steps: int
    """Of fine-tuning."""
    lr: float
    """Of fine-tuning."""
    short_steps: int
    """Of arms that show what comes out of fewer steps."""
    short_lr: float
    """Of these arms."""
    anchors: int
    draws: int = 1
    """Of noise and time for each frame, in arms that say how many frames they have."""


FAMILIES = {
    "act": Family(
        make=act,
        perception="encoder",
        lora_targets="linear1;linear2",
        rounds=((1500, 1e-3), (500, 2e-4)),
        steps=1500,
        lr=1e-3,
        short_steps=500,
        short_lr=1e-3,
        anchors=512,
    ),
    "diffusion": Family(
        make=diffusion,
        # The condition vector comes before anything that is trained when there are no images.
        perception="down",
        lora_targets="cond_encoder.1",
        rounds=((4000, 1e-3), (1000, 2e-4)),
        # At 1e-3 plain fine-tuning opens 0.68 of the doors after 1500 steps, 0.82 after 3000. At a
        # third of that rate the noise of a few anchors moves the weights less.
        steps=6000,
        lr=3e-4,
        short_steps=1500,
        short_lr=1e-3,
        # An anchor has one noise and one time: of 512, the policy learns these draws by heart, with
        # L_ret 0.002 on them and 0.015 on others.
        anchors=2048,
        draws=4,
    ),
}


def write_fresh(
    family: str,
    folder: Path,
    data: Sequence[Path],
    *,
    seed: int,
    as_recorded: bool = False,
    view: View | None = None,
) -> Path:
    """Save an untrained policy with processors for the data; one that is there is kept.

    `as_recorded` leaves the data's statistics as they are, as `lerobot-train` does.
    """
    if folder.is_dir():
        return folder
    view = view or View()
    torch.manual_seed(seed)
    sizes = view.vectors
    inputs = {name: PolicyFeature(type=t, shape=(sizes[name],)) for name, t in _TYPES.items()}
    policy = FAMILIES[family].make(inputs)
    partial = folder.with_name(f".{folder.name}.partial")
    policy.save_pretrained(partial)
    scales_by_range = NormalizationMode.MIN_MAX in policy.config.normalization_mapping.values()
    each = [LeRobotDatasetMetadata(part.name, root=part).stats for part in data]
    # Joining one alone would round its numbers once more.
    statistics = each[0] if len(each) == 1 else aggregate_stats(each)
    if not as_recorded:
        _give_least_spread(statistics, scales_by_range=scales_by_range)
    if view.numbered:
        _expect_every_number(statistics[WORLD], len(view.numbered))
    for processor in make_pre_post_processors(policy.config, dataset_stats=statistics):
        processor.save_pretrained(partial)
    partial.rename(folder)
    return folder


def _expect_every_number(stats: dict[str, Any], count: int) -> None:
    """Statistics of one-hot numbers that are equally frequent, whichever the data has."""
    stats["mean"] = np.full(count, 1 / count)
    stats["std"] = np.full(count, np.sqrt(1 / count * (1 - 1 / count)))


def _give_least_spread(stats: dict[str, dict[str, Any]], *, scales_by_range: bool) -> None:
    for feature in _TYPES:
        own = stats[feature]
        own["std"] = own["std"].clip(min=LEAST_SPREAD)
        # A diffusion policy scales by these; for ACT they only say where the old data lies.
        for edge, sign in (("min", -1), ("max", 1)) if scales_by_range else ():
            own[edge] = own["mean"] + sign * (abs(own[edge] - own["mean"])).clip(min=LEAST_SPREAD)
    # Diffusion cuts off what it predicts at these, and new tasks need actions that the old do not.
    for edge, sign in (("min", -1), ("max", 1)):
        stats[ACTION][edge] = sign * np.ones_like(stats[ACTION][edge])
