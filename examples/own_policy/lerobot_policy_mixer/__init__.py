"""A policy of one's own: importing it registers its type with LeRobot."""

from lerobot_policy_mixer.configuration_mixer import MixerConfig

__all__ = ["MixerConfig"]
