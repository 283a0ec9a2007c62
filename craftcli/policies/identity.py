"""Digests that tell whether a cache, a teacher and a dataset belong together."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from craftcli.cache.format import DatasetIdentity, TeacherIdentity
from craftcli.policies.loading import Checkpoint

# Settings that change how a policy is trained, saved or decoded, not what a forward pass computes.
_RUNTIME_PREFIXES = ("optimizer_", "scheduler_", "compile_")
_RUNTIME_KEYS = frozenset(
    {
        "device",
        "gradient_checkpointing",
        "license",
        "max_decoding_steps",
        "n_action_steps",
        "pretrained_path",
        "pretrained_revision",
        "private",
        "push_to_hub",
        "repo_id",
        "rtc_config",
        "tags",
        "temperature",
        "use_amp",
        "use_kv_cache",
        "use_peft",
        "validate_action_token_prefix",
    }
)


def teacher_identity(checkpoint: Checkpoint) -> TeacherIdentity:
    """Who the teacher is: digests of its weights, its settings and its preprocessor."""
    dtype = checkpoint.adapter.compute_dtype(checkpoint.policy)
    return TeacherIdentity(
        source=checkpoint.source,
        revision=checkpoint.revision,
        policy_type=checkpoint.policy_type,
        weights_digest=weights_digest(*checkpoint.weight_files),
        config_digest=config_digest(checkpoint.folder / "config.json"),
        processor_digest=processor_digest(checkpoint.preprocess),
        dtype=str(dtype).removeprefix("torch."),
    )


def dataset_identity(dataset: Any, selected: Iterable[int]) -> DatasetIdentity:
    """Which dataset the rows came from, and which of its frames they are."""
    meta = dataset.meta
    content = hashlib.sha256(_canonical(meta.features))
    content.update(f"{meta.total_episodes} {meta.total_frames} {meta.fps}".encode())
    # Rows as they are on disk: decoded ones depend on the policy's chunk length and the decoder.
    stored = dataset.hf_dataset.with_format("arrow")
    for index in _spread(len(dataset), 8):
        content.update(repr(stored[index : index + 1].to_pylist()).encode())
    chosen = hashlib.sha256(" ".join(map(str, selected)).encode())
    return DatasetIdentity(
        repo_id=dataset.repo_id,
        root=str(dataset.root),
        revision=dataset.revision,
        fingerprint=content.hexdigest(),
        episodes=meta.total_episodes,
        frames=meta.total_frames,
        selection_digest=chosen.hexdigest(),
    )


def weights_digest(*files: Path) -> str:
    """Digest of every tensor by name, independent of their order in a file."""
    digest = hashlib.sha256()
    for file in files:
        with safe_open(str(file), framework="pt") as saved:
            for name in sorted(saved.keys()):
                tensor = saved.get_tensor(name)
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(_bytes(tensor))
    return digest.hexdigest()


def config_digest(file: Path) -> str:
    """Digest of the settings that decide what the policy computes."""
    config = json.loads(file.read_text())
    kept = {
        key: value
        for key, value in config.items()
        if key not in _RUNTIME_KEYS and not key.startswith(_RUNTIME_PREFIXES)
    }
    return hashlib.sha256(_canonical(_without_folders(kept))).hexdigest()


def processor_digest(pipeline: Any) -> str:
    """Digest of a preprocessor: its steps, their settings and the normaliser's statistics."""
    steps = _without_folders(pipeline.get_config())
    for step in steps["steps"]:
        step["config"].pop("device", None)
    digest = hashlib.sha256(_canonical(steps))
    for name, tensors in sorted(pipeline.state_dict().items()):
        for key, tensor in sorted(tensors.items()):
            digest.update(f"{name} {key}".encode())
            digest.update(_bytes(tensor.to(torch.float64)))
    return digest.hexdigest()


def _without_folders(value: Any) -> Any:
    """The same settings with local paths cut to their last part: they differ between machines."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _bytes(tensor: torch.Tensor) -> bytes:
    flat: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return flat


def _spread(count: int, wanted: int) -> list[int]:
    """Up to `wanted` positions spread evenly over `count`."""
    return sorted({i * (count - 1) // max(wanted - 1, 1) for i in range(min(wanted, count))})
