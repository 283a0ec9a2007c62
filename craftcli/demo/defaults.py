"""Facts about the demo that need no heavy import: its policy type, and settings for its size."""

from typing import Any

DEMO_POLICY_TYPE = "craft_tiny_pi0_fast"
"""The name under which LeRobot knows the demo's policy."""

DEMO_TRAINING: dict[str, Any] = {"steps": 400, "batch_size": 32}
"""Training settings that differ from the defaults."""
