"""Policies of the sizes that people train, with random weights, made without a download.

ACT and diffusion are LeRobot's defaults, smolvla has the widths of SmolVLM2-500M, and pi0_fast
those that LeRobot hard-codes. Each comes with a small dataset of random images, and with a tiny
version.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.policies.pi0_fast.configuration_pi0_fast import PI0FastConfig
from lerobot.policies.pi0_fast.modeling_pi0_fast import PI0FastPolicy
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from tiny import act, diffusion, smolvla
from tiny.world import ACTIONS, PX, TASKS, input_features, output_features, save, write_dataset
from train_step import QUICK, make_policy

from craftcli.demo.tokenizers import (
    build_action_tokenizer,
    build_text_tokenizer,
    register_action_tokenizer,
    tokenizer_folders,
)
from craftcli.policies.lerobot.loading import read_once

FRAMES = 24
"""Frames of an episode: a diffusion policy leaves its last seven out."""
PI0_FAST_CHUNK = 10


@dataclass(frozen=True, kw_only=True)
class World:
    """A policy's folder, and a dataset for it."""

    policy: Path
    dataset: str


@dataclass(frozen=True, kw_only=True)
class Size:
    """A policy of real size, and how it is trained here."""

    make: Callable[[Path], World]
    make_quick: Callable[[Path], World]
    batch: int
    anchors: int
    """Rows of its cache."""
    lora: str | None = None
    rounds: int = 3
    """Steps of each kind that are compared, and steps of `craft dryrun` and `craft train`."""
    build: tuple[str, ...] = ()
    """Further options of `craft cache build`."""
    own_tokenizers: bool = False
    """Whether its tokenizers are the demo's, which craft knows only when it is told."""


def random_policy(build: Callable[[], Any]) -> Any:
    """A policy with random weights, in the memory of its own dtype alone."""
    torch.manual_seed(0)
    with read_once() as unfilled:
        policy = build()
    for parameter in policy.parameters():
        if unfilled.is_left(parameter):
            parameter.data.normal_(0, 0.02)
    return policy


def make_act(folder: Path) -> World:
    """LeRobot's default: 52M parameters, ResNet-18, chunks of 100 actions; one camera of 224 px."""
    config = ACTConfig(pretrained_backbone_weights=None, **_common(cameras=1, px=224))
    return _write(folder, random_policy(lambda: ACTPolicy(config)), px=224)


def make_diffusion(folder: Path) -> World:
    """LeRobot's default: 260M parameters, a U-Net of 512, 1024 and 2048 channels."""
    config = DiffusionConfig(pretrained_backbone_weights=None, **_common(cameras=1, px=96))
    return _write(folder, random_policy(lambda: DiffusionPolicy(config)), px=96)


def make_smolvla(folder: Path) -> World:
    """SmolVLA: 16 layers of SmolVLM2-500M and their expert; one camera, shown at 512 px."""
    vlm = smolvla.write_vlm(folder / "vlm", text=_SMOL_TEXT, vision=_SMOL_VISION, scale=4)
    config = SmolVLAConfig(
        vlm_model_name=str(vlm), load_vlm_weights=False, **_common(cameras=1, px=256)
    )
    return _write(folder, random_policy(lambda: SmolVLAPolicy(config)), px=256)


def make_pi0_fast(folder: Path) -> World:
    """pi0_fast: PaliGemma of 2.9B parameters, its language model in bfloat16; one camera."""
    register_action_tokenizer()
    text, action = tokenizer_folders(folder)
    build_text_tokenizer([word for task in TASKS for word in task.split()]).save_pretrained(text)
    chunks = np.random.default_rng(0).uniform(-1.7, 1.7, (400, PI0_FAST_CHUNK, ACTIONS))
    build_action_tokenizer(chunks, scale=2.0, vocab_size=60).save_pretrained(action)
    config = PI0FastConfig(
        dtype="bfloat16",
        text_tokenizer_name=str(text),
        action_tokenizer_name=str(action),
        fast_skip_tokens=0,
        validate_action_token_prefix=False,  # weights at random decode anything
        chunk_size=PI0_FAST_CHUNK,
        n_action_steps=PI0_FAST_CHUNK,
        **_common(cameras=1, px=224),
    )
    return _write(folder, random_policy(lambda: PI0FastPolicy(config)), px=224)


def _quick_act(folder: Path) -> World:
    return _write(folder, act.policy(cameras=1))


def _quick_diffusion(folder: Path) -> World:
    return _write(folder, diffusion.policy(cameras=1))


def _quick_smolvla(folder: Path) -> World:
    return _write(folder, smolvla.policy(smolvla.write_vlm(folder / "vlm")))


def _quick_pi0_fast(folder: Path) -> World:
    """The demo's policy with other sizes: LeRobot's own cannot be made small."""
    make_policy(QUICK, folder / "policy")
    return World(policy=folder / "policy", dataset="demo")


SIZES = {
    "act": Size(make=make_act, make_quick=_quick_act, batch=8, anchors=16),
    "diffusion": Size(make=make_diffusion, make_quick=_quick_diffusion, batch=8, anchors=16),
    "smolvla": Size(make=make_smolvla, make_quick=_quick_smolvla, batch=4, anchors=8),
    "pi0_fast": Size(
        make=make_pi0_fast,
        make_quick=_quick_pi0_fast,
        batch=1,
        anchors=4,
        lora="r=8,targets=q_proj;v_proj",
        # A step of 2.9B parameters takes minutes of a core, and so do the 255 tokens that it would
        # decode for every anchor.
        rounds=1,
        build=("--actions", "data"),
        own_tokenizers=True,
    ),
}
_SMOL_TEXT = {
    "vocab_size": 49280,
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
_SMOL_VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}


def _common(*, cameras: int, px: int) -> dict[str, Any]:
    return {
        "device": "cpu",
        "push_to_hub": False,
        "input_features": input_features(cameras=cameras, px=px),
        "output_features": output_features(),
    }


def _write(folder: Path, policy: Any, *, px: int = PX) -> World:
    save(folder / "policy", policy)
    data = write_dataset(folder / "data", frames=FRAMES, px=px)
    return World(policy=folder / "policy", dataset=str(data))
