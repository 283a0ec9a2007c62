"""Processors of the demo's policy: those of pi0_fast, under the name that LeRobot looks up."""

from lerobot.policies.pi0_fast.processor_pi0_fast import (
    make_pi0_fast_pre_post_processors as make_craft_tiny_pi0_fast_pre_post_processors,
)

__all__ = ["make_craft_tiny_pi0_fast_pre_post_processors"]
