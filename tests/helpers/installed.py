"""Packages of the examples, as an installer leaves them."""

import importlib
from collections.abc import Mapping
from pathlib import Path


def install(
    site: Path, name: str, entry_points: Mapping[str, Mapping[str, str]] | None = None
) -> None:
    """Write what others find a package by: its name, and its entry points by group."""
    about = site / f"{name}-0.1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = [
        line
        for group, entries in (entry_points or {}).items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    importlib.invalidate_caches()
