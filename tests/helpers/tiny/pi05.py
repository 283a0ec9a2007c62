"""A pi05 policy of some 100 000 parameters."""

from pathlib import Path
from typing import Any

import torch
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors

from tiny.configuration_tiny_pi import TinyPI05Config
from tiny.family import Family
from tiny.modeling_tiny_pi import TinyPI05Policy
from tiny.paligemma import pi_family, pi_settings, save_with_words


def make(folder: Path) -> Path:
    return save_with_words(folder, policy(), make_pi05_pre_post_processors)


def policy(**settings: Any) -> TinyPI05Policy:
    torch.manual_seed(0)
    made = TinyPI05Policy(TinyPI05Config(**pi_settings(**settings)))
    # At first time modulates nothing; in a trained policy it does.
    for name, parameter in made.named_parameters():
        if name.endswith("norm.dense.weight"):
            torch.nn.init.normal_(parameter, std=0.2)
    return made


PI05: Family = pi_family("pi05", make, time_layers="model.time_mlp_")
