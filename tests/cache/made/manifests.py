"""Manifests of small caches."""

from typing import Any

from craftcli.cache.format import DatasetIdentity, Manifest, TeacherIdentity

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
