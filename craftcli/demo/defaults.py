"""Facts about the demo that need no heavy import: its policy type, and settings for its size."""

from typing import Any

DEMO_POLICY_TYPE = "craft_tiny_pi0_fast"
"""The name under which LeRobot knows the demo's policy."""

DEMO_TRAINING: dict[str, Any] = {"steps": 400, "batch_size": 32}
"""Training settings that differ from the defaults."""


def is_of_demo(policy_type: str) -> bool:
    """Whether a policy of this type is the demo's, which comes with craft and may be opened.

    Any other teacher of a cache is opened only if the user names it: a cache may come from anybody,
    and its manifest may name any folder.
    """
    return policy_type == DEMO_POLICY_TYPE
