"""The policy families: a tiny real policy of each, and what of it can be held."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
from tiny import act, diffusion, multi_task_dit, pi0, pi05, smolvla, vqbet, xvla
from tiny.paligemma import save_with_words
from tiny.words import text_tokenizer
from tiny.world import save
from torch import nn

from craftcli.cache.layers import parse_layers
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.policies.base import PolicyAdapter


@dataclass(frozen=True)
class Held:
    """What `--mode hidden` holds."""

    stack: str
    layers: str
    pooling: str

    @property
    def name(self) -> str:
        """As a row of the table says it."""
        return f"{self.stack} {self.layers} {self.pooling}"

    def is_default_of(self, adapter: PolicyAdapter) -> bool:
        """Whether the adapter would choose it."""
        layers = parse_layers(self.layers)
        default = (adapter.default_stack, adapter.default_layers, adapter.default_pooling)
        return (self.stack, layers, self.pooling) == default


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of policies and how much its tiny one has to be taught."""

    held: tuple[Held, ...]
    """The perception side first, then towards the action."""
    fresh: Callable[[Path], Path]
    """Write an untrained policy."""
    cameras: int = 1
    lr: float = 2e-3
    batch_size: int = 16
    teaching: int = 400
    """Steps on the old data; 0 for a policy that comes trained."""


def _act(folder: Path) -> Path:
    # States alone: a resnet takes ten times as long, and the transformers are what is tapped.
    return save(folder, act.policy(cameras=0, use_vae=False))


def _diffusion(folder: Path) -> Path:
    return save(folder, diffusion.policy(cameras=0, scheduler_warmup_steps=0))


def _vqbet(folder: Path) -> Path:
    # Offsets weigh 10,000 for LeRobot, beside which codes are not learnt in so few steps.
    weights = {"offset_loss_weight": 10.0}
    return save(folder, vqbet.policy(vision_backbone="resnet_of_two_layers", **weights))


def _two_layers(weights: None) -> nn.Module:
    """In place of a resnet with 11M parameters; LeRobot takes off the last two modules."""
    seen = (nn.Conv2d(3, 16, kernel_size=8, stride=8), nn.ReLU(), nn.Conv2d(16, 32, 1), nn.ReLU())
    return nn.Sequential(*seen, nn.AdaptiveAvgPool2d(1), nn.Flatten())


# LeRobot looks a backbone up by its name, which has to begin so.
torchvision.models.resnet_of_two_layers = _two_layers


def _multi_task_dit(folder: Path) -> Path:
    encoders = folder.with_name("encoders")
    return save(folder, multi_task_dit.policy(encoders))


def _smolvla(folder: Path) -> Path:
    vlm = smolvla.write_vlm(folder.with_name("vlm"))
    return save(folder, smolvla.policy(vlm, **_ONE_CAMERA))


def _pi0(folder: Path) -> Path:
    return save_with_words(folder, pi0.policy(**_ONE_CAMERA), make_pi0_pre_post_processors)


def _pi05(folder: Path) -> Path:
    return save_with_words(folder, pi05.policy(**_ONE_CAMERA), make_pi05_pre_post_processors)


def _xvla(folder: Path) -> Path:
    words = folder / "text_tokenizer"
    text_tokenizer().save_pretrained(words)
    return save(folder, xvla.policy(tokenizer_name=str(words), px=32, **_ONE_CAMERA))


def _pi0_fast(folder: Path) -> Path:
    """The demo's teacher with its weights shaken out."""
    from craftcli.policies.lerobot.checkpoint import load_checkpoint

    demo = load_checkpoint(str(TEACHER_FOLDER), device="cpu")
    torch.manual_seed(0)
    fresh = type(demo.policy)(demo.policy.config)
    for part in (fresh, demo.preprocess, demo.postprocess):
        part.save_pretrained(folder)
    return folder


_ONE_CAMERA: dict[str, Any] = {"cameras": 1, "empty_cameras": 0}


def _settings(*rows: str) -> tuple[Held, ...]:
    return tuple(Held(*row.split()) for row in rows)


def _beside_a_vlm(stack: str) -> tuple[Held, ...]:
    return _settings(
        "vlm -2,-1 vision_text",
        f"{stack} -2,-1 mean_action_tokens",
        f"{stack} -2,-1 action_tokens",
        f"{stack} -1 action_tokens",
    )


FAMILIES: dict[str, Family] = {
    "pi0_fast": Family(
        fresh=_pi0_fast,
        teaching=0,
        held=_settings(
            "vlm -2,-1 vision_text",
            "vlm -2,-1 mean_action_tokens",
            "vlm -2,-1 action_tokens",
            "vlm -1 action_tokens",
        ),
    ),
    "pi0": Family(fresh=_pi0, held=_beside_a_vlm("expert")),
    "pi05": Family(fresh=_pi05, held=_beside_a_vlm("expert")),
    "smolvla": Family(fresh=_smolvla, held=_beside_a_vlm("expert")),
    "xvla": Family(fresh=_xvla, batch_size=8, held=_beside_a_vlm("transformer")),
    "act": Family(
        fresh=_act,
        cameras=0,
        held=_settings(
            "encoder -1 mean_masked",
            "encoder -2,-1 mean_masked",
            "decoder -1 mean_action_tokens",
            "decoder -2,-1 action_tokens",
            "decoder -1 action_tokens",
        ),
    ),
    "diffusion": Family(
        fresh=_diffusion,
        teaching=800,
        cameras=0,
        held=_settings(
            "conditioning -1 last_token",
            "down -1 action_tokens",
            "bottleneck -1 action_tokens",
            "up -1 mean_action_tokens",
            "up -2,-1 action_tokens",
            "up -1 action_tokens",
        ),
    ),
    "vqbet": Family(
        fresh=_vqbet,
        teaching=800,
        held=_settings(
            "gpt -1 vision_text",
            "gpt -1 mean_action_tokens",
            "gpt -2,-1 action_tokens",
            "gpt -1 action_tokens",
        ),
    ),
    "multi_task_dit": Family(
        fresh=_multi_task_dit,
        teaching=800,
        cameras=2,
        held=_settings(
            "conditioning -1 last_token",
            "transformer -1 mean_action_tokens",
            "transformer -2,-1 action_tokens",
            "transformer -1 action_tokens",
        ),
    ),
}


def arms(family: Family) -> Iterator[dict[str, Any]]:
    """Every way of fine-tuning, as an [[arm]] of `craft compare --sweep`."""
    yield {"name": "none", "train": {"mode": "none"}}
    for held in family.held:
        yield {
            "name": held.name,
            "train": {"mode": "hidden", "freeze_downstream": False},
            "cache": vars(held),
        }
    for mode in ("action", "hidden+action"):
        yield {"name": mode, "train": {"mode": mode}}
