"""craft: fine-tune robot policies on a new task without forgetting the old ones."""

from typing import TYPE_CHECKING

from craftcli.lazy_names import lazy_names

if TYPE_CHECKING:
    from craftcli.config.retention import RetentionConfig
    from craftcli.engine.retention.retention import Retention
    from craftcli.policies.lerobot.checkpoint import load_checkpoint

__version__ = "0.1.0"
__all__ = ["Retention", "RetentionConfig", "load_checkpoint"]

__getattr__ = lazy_names(
    __name__,
    {
        "Retention": "engine.retention.retention",
        "RetentionConfig": "config.retention",
        "load_checkpoint": "policies.lerobot.checkpoint",
    },
)
