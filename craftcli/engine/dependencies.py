"""What a run depends on outside its folder: cache, dataset, the policy under LoRA weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from craftcli.engine.outside import (
    CACHE,
    DATASET,
    LORA_BASE,
    Dependency,
    digest_dataset,
    digest_policy,
)
from craftcli.engine.retention.anchors import AnchorSet, NumberedAnchors
from craftcli.policies.identity import DatasetIdentity
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.identity import identities


def find_dependencies(
    student: Checkpoint,
    dataset: Any,
    anchors: NumberedAnchors | None,
    *,
    before: Mapping[str, Dependency],
) -> dict[str, Dependency]:
    """The dependencies of a run as they are now, by their names in a checkpoint's manifest.

    `before` are those of the checkpoint that is resumed: large files are read as they were then.
    """
    found = {}
    for number, data in enumerate(identities(dataset), start=1):
        # Of several datasets: dataset, dataset.2, dataset.3 and so on.
        name = DATASET if number == 1 else f"{DATASET}.{number}"
        found[name] = _dataset(data, before.get(name))
    # A live teacher has no cache, and is checked when it is opened again.
    if isinstance(anchors, AnchorSet):
        path, digest = anchors.reader.path, anchors.reader.content_digest()
        folder = str(path.absolute()) if isinstance(path, Path) else None
        found[CACHE] = Dependency(name=str(path), folder=folder, digest=digest)
    if student.peft is not None:
        found[LORA_BASE] = _lora_base(student, before.get(LORA_BASE))
    return found


def _dataset(data: DatasetIdentity, before: Dependency | None) -> Dependency:
    files = None
    if data.root is not None:
        files = digest_dataset(Path(data.root), before.files if before else None)
    return Dependency(name=data.repo_id, folder=data.root, digest=data.fingerprint, files=files)


def _lora_base(student: Checkpoint, before: Dependency | None) -> Dependency:
    """The policy under the LoRA weights; those are in the checkpoint itself."""
    weights = student.weight_files[0]
    folder = str(weights.parent)
    files = digest_policy(weights.parent, before.files if before else None)
    return Dependency(name=folder, folder=folder, digest=files[weights.name], files=files)
