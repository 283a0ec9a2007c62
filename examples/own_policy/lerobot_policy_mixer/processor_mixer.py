"""From a dataset's rows to the policy's inputs, and back: LeRobot's default."""

from typing import Any

from lerobot.processor import make_default_pre_post_processors

from lerobot_policy_mixer.configuration_mixer import MixerConfig


def make_mixer_pre_post_processors(config: MixerConfig, dataset_stats: Any = None) -> Any:
    """Normalise, batch and move to the device; undo it for actions."""
    return make_default_pre_post_processors(config, dataset_stats, normalizer_device=config.device)
