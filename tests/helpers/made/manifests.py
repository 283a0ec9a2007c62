"""Manifests of small caches."""

import json
from pathlib import Path
from typing import Any

from craftcli.cache.format import Manifest
from craftcli.cache.storage.zarr_layout import attributes_digest
from craftcli.policies.identity import DatasetIdentity, TeacherIdentity

TEACHER = TeacherIdentity(
    source="a/b",
    revision="1f2e",
    policy_type="pi0_fast",
    weights_digest="w",
    config_digest="c",
    processor_digest="p",
    dtype="float32",
)
DATASET = DatasetIdentity(
    repo_id="a/old",
    root=None,
    revision=None,
    fingerprint="f",
    episodes=5,
    frames=100,
    selection_digest="s",
)


def edit_manifest(path: Path, part: str = "teacher", **changes: str) -> None:
    """Change fields of the manifest of a cache on disk, in one of its parts."""
    file = path / "zarr.json"
    metadata = json.loads(file.read_text())
    attributes = metadata["attributes"]
    attributes["craft"][part].update(changes)
    attributes["digest"] = attributes_digest(attributes)
    file.write_text(json.dumps(metadata))


def make_manifest(**changes: Any) -> Manifest:
    """Of two layers and ten rows, the last chunk not full, unless it is told otherwise."""
    values: dict[str, Any] = {
        "complete": True,
        "rows": 10,
        "rows_per_chunk": 4,
        "stack": "vlm",
        "layers": (2, 3),
        "layer_count": 4,
        "pooling": "mean",
        "vectors": 2,
        "dim": 3,
        "dtype": "float32",
        "images": "embedded",
        "sampling": "uniform",
        "prompts_digest": None,
        "seed": 0,
        "teacher": TEACHER,
        "dataset": DATASET,
    }
    return Manifest(**(values | changes))
