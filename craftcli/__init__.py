"""craft: fine-tune robot policies on a new task without forgetting the old ones."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from craftcli.config import RetentionConfig
    from craftcli.engine.retention import Retention
    from craftcli.policies.loading import load_checkpoint

__version__ = "0.1.0"
__all__ = ["Retention", "RetentionConfig", "load_checkpoint"]

_HOMES = {
    "Retention": "craftcli.engine.retention",
    "RetentionConfig": "craftcli.config",
    "load_checkpoint": "craftcli.policies.loading",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch and LeRobot take many seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
