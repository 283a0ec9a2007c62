"""What a run depends on outside its folder: cache, dataset, the policy under LoRA weights."""

from pathlib import Path
from typing import Any

from craftcli.engine.checkpoint_manifest import Dependency, file_digest
from craftcli.engine.retention.anchors import AnchorSet, NumberedAnchors
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.identity import identities

CACHE = "cache"
DATASET = "dataset"
LORA_BASE = "lora_base"


def find_dependencies(
    student: Checkpoint, dataset: Any, anchors: NumberedAnchors | None
) -> dict[str, Dependency]:
    """The dependencies of a run as they are now, by their names in a checkpoint's manifest."""
    found = {
        # Of several datasets: dataset, dataset.2, dataset.3 and so on.
        DATASET if number == 1 else f"{DATASET}.{number}": Dependency(
            name=data.repo_id, folder=data.root, digest=data.fingerprint
        )
        for number, data in enumerate(identities(dataset), start=1)
    }
    # A live teacher has no cache, and is checked when it is opened again.
    if isinstance(anchors, AnchorSet):
        path, digest = anchors.reader.path, anchors.reader.content_digest()
        folder = str(path.absolute()) if isinstance(path, Path) else None
        found[CACHE] = Dependency(name=str(path), folder=folder, digest=digest)
    if student.peft is not None:
        # The file under the LoRA weights; those are in the checkpoint itself.
        weights = student.weight_files[0]
        found[LORA_BASE] = Dependency(
            name=str(weights.parent), folder=str(weights.parent), digest=file_digest(weights)
        )
    return found
