"""craft: fine-tune robot policies on a new task without forgetting the old ones."""

__version__ = "0.1.0"
