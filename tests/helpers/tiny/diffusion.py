"""Diffusion policy with two cameras."""

from pathlib import Path
from typing import Any

import torch
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from torch import Tensor

from craftcli.policies.base import NOISE, TIME
from tiny.family import SEED, Family, hooked, keyword_of, own_forward
from tiny.world import CAMERAS, input_features, output_features, save

HORIZON, STEPS = 8, 6


def policy(*, cameras: int = 2, **settings: Any) -> DiffusionPolicy:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "down_dims": (16, 32),
        "use_separate_rgb_encoder_per_camera": False,
        "num_train_timesteps": STEPS,
    }
    return DiffusionPolicy(
        DiffusionConfig(
            device="cpu",
            push_to_hub=False,
            input_features=input_features(cameras=cameras, env=not cameras),
            output_features=output_features(),
            pretrained_backbone_weights=None,
            use_group_norm=True,
            spatial_softmax_num_keypoints=4,
            horizon=HORIZON,
            n_action_steps=4,
            drop_n_last_frames=3,
            kernel_size=3,
            diffusion_step_embed_dim=16,
            **{**defaults, **settings},
        )
    )


def make(folder: Path) -> Path:
    return save(folder, policy())


_LAYERS = {
    "down": ["down_modules.0.0", "down_modules.0.1"],
    "bottleneck": ["mid_modules.0", "mid_modules.1"],
    "up": ["up_modules.0.2", "final_conv.0"],
}


def _reference(policy: Any, batch: dict[str, Any], stack: str) -> dict[int, Tensor]:
    run = own_forward(policy, batch)
    if stack == "conditioning":
        return {0: keyword_of(policy, "diffusion.unet", "global_cond", run).unsqueeze(1)}
    seen = hooked(policy, [f"diffusion.unet.{name}" for name in _LAYERS[stack]], run)
    return {layer: states.transpose(1, 2) for layer, states in seen.items()}


def _draw(_policy: Any, batch: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(SEED)
    actions = batch["action"]
    return {
        NOISE: torch.randn(actions.shape),
        TIME: torch.randint(low=0, high=STEPS, size=(len(actions),)),
    }


_UNET = "diffusion.unet"
DIFFUSION = Family(
    name="diffusion",
    make=make,
    reference=_reference,
    draw=_draw,
    camera=CAMERAS[1],
    reached={
        "conditioning": ("diffusion.rgb_encoder",),
        "down": ("diffusion.rgb_encoder", f"{_UNET}.down_modules.0"),
        "bottleneck": ("diffusion.rgb_encoder", f"{_UNET}.down_modules", f"{_UNET}.mid_modules"),
        "up": ("diffusion.rgb_encoder", f"{_UNET}.mid_modules", f"{_UNET}.up_modules"),
    },
    untouched={
        "conditioning": (_UNET,),
        "down": (f"{_UNET}.down_modules.1", f"{_UNET}.mid_modules", f"{_UNET}.final_conv"),
        "bottleneck": (f"{_UNET}.up_modules", f"{_UNET}.final_conv"),
        "up": (f"{_UNET}.final_conv.1",),
    },
)
