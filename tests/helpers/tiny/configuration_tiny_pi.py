"""Configurations of small pi05, pi0 and pi0_fast policies, registered as LeRobot's plug-ins are."""

from dataclasses import dataclass

from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi0_fast.configuration_pi0_fast import PI0FastConfig
from lerobot.policies.pi05.configuration_pi05 import PI05Config


@dataclass
class Sizes:
    """What LeRobot hard-codes, small; it also hard-codes 8 heads, which therefore stay."""

    width: int = 32
    expert_width: int = 24
    depth: int = 3
    mlp_dim: int = 48
    head_dim: int = 8
    vocab_size: int = 320
    vision_depth: int = 2
    patch_px: int = 8


@PreTrainedConfig.register_subclass("craft_tiny_pi05")
@dataclass
class TinyPI05Config(PI05Config, Sizes):
    """pi05 with every width made small."""


@PreTrainedConfig.register_subclass("craft_tiny_pi0")
@dataclass
class TinyPI0Config(PI0Config, Sizes):
    """pi0 with every width made small."""


@PreTrainedConfig.register_subclass("craft_small_pi0_fast")
@dataclass
class SmallPI0FastConfig(PI0FastConfig, Sizes):
    """pi0_fast with every width made small; the demo's own has one camera and short prompts."""
