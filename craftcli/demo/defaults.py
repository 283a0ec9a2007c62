"""Settings that suit the demo's size; everything else is as for any policy."""

from typing import Any

DEMO_TRAINING: dict[str, Any] = {"steps": 400, "batch_size": 32}
