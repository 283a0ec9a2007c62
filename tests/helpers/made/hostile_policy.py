"""Policy folders that try to run a program when they are opened."""

import json
from pathlib import Path
from typing import Any

PREPROCESSOR = "policy_preprocessor.json"


def popen_step(marker: Path) -> dict[str, Any]:
    """A processor step with which LeRobot alone would run `touch MARKER`."""
    return {"class": "subprocess.Popen", "config": {"args": ["touch", str(marker)]}}


def add_step(folder: Path, step: dict[str, Any], *, file: str = PREPROCESSOR) -> None:
    """Put a step in front of those of a processor file."""
    path = folder / file
    content: dict[str, Any] = {"name": "x", "steps": []}
    if path.is_file():
        content = json.loads(path.read_text("utf-8"))
    content["steps"].insert(0, step)
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_json(file: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    content = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**content, **changes}), encoding="utf-8")
