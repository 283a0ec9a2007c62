"""A pi0 policy of some 100 000 parameters."""

from pathlib import Path
from typing import Any

import torch
from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors

from tiny.configuration_tiny_pi import TinyPI0Config
from tiny.family import Family
from tiny.modeling_tiny_pi import TinyPI0Policy
from tiny.paligemma import pi_family, pi_settings, save_with_words


def make(folder: Path) -> Path:
    return save_with_words(folder, policy(), make_pi0_pre_post_processors)


def policy(**settings: Any) -> TinyPI0Policy:
    torch.manual_seed(0)
    return TinyPI0Policy(TinyPI0Config(**pi_settings(**settings)))


PI0: Family = pi_family("pi0", make, time_layers="model.action_time_mlp_")
