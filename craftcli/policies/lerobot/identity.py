"""Computing the digests that show whether a cache, a teacher and a dataset belong together."""

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from craftcli.policies.identity import DatasetIdentity, TeacherIdentity
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.weight_files import WeightsFile

# Settings of training, saving and decoding; they do not change what a forward pass computes.
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

_TOKENIZERS = {
    "tokenizer_name": "input_tokenizer",
    "action_tokenizer_name": "action_tokenizer",
}
"""Settings of LeRobot's steps that name a tokenizer, and where the step has it."""


def teacher_identity(checkpoint: Checkpoint) -> TeacherIdentity:
    """The teacher's identity: digests of its weights, its settings and its preprocessor."""
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


SEVERAL = "several:"
"""Before the fingerprint of several datasets in one order."""


def dataset_identity(dataset: Any, selected: Iterable[int]) -> DatasetIdentity:
    """The identity of a dataset, or of several, and of the frames that were selected from it."""
    if parts := getattr(dataset, "parts", ()):
        return _joined_identity([dataset_identity(part, []) for part in parts], selected)
    meta = dataset.meta
    content = hashlib.sha256(_canonical(meta.features))
    content.update(f"{meta.total_episodes} {meta.total_frames} {meta.fps}".encode())
    # Rows as stored on disk: decoded ones depend on the policy's chunk length and the decoder.
    stored = dataset.hf_dataset.with_format("arrow")
    for index in _spread(len(dataset), 8):
        content.update(repr(stored[index : index + 1].to_pylist()).encode())
    return DatasetIdentity(
        repo_id=dataset.repo_id,
        root=str(Path(dataset.root).absolute()),
        revision=dataset.revision,
        fingerprint=content.hexdigest(),
        episodes=meta.total_episodes,
        frames=meta.total_frames,
        selection_digest=_selection_digest(selected),
    )


def part_identities(dataset: Any, selected: Sequence[int]) -> tuple[DatasetIdentity, ...] | None:
    """The identities of several datasets, each with its own selected frames; None of a single one.

    `selected` are counted through all datasets, the frames of each identity from its own start.
    """
    parts = getattr(dataset, "parts", ())
    if not parts:
        return None
    begins = list(zip(dataset.offsets[:-1], dataset.offsets[1:], strict=True))
    return tuple(
        dataset_identity(part, [frame - int(low) for frame in selected if low <= frame < high])
        for part, (low, high) in zip(parts, begins, strict=True)
    )


def identities(dataset: Any) -> tuple[DatasetIdentity, ...]:
    """The identity of every dataset that a dataset consists of; of a single one, its own."""
    return part_identities(dataset, []) or (dataset_identity(dataset, []),)


def _joined_identity(parts: list[DatasetIdentity], selected: Iterable[int]) -> DatasetIdentity:
    every = hashlib.sha256(" ".join(part.fingerprint for part in parts).encode())
    return DatasetIdentity(
        repo_id="+".join(part.repo_id for part in parts),
        root=None,
        revision=None,
        fingerprint=SEVERAL + every.hexdigest(),
        episodes=sum(part.episodes for part in parts),
        frames=sum(part.frames for part in parts),
        selection_digest=_selection_digest(selected),
    )


def _selection_digest(selected: Iterable[int]) -> str:
    return hashlib.sha256(" ".join(map(str, selected)).encode()).hexdigest()


def video_decoder(dataset: Any) -> str | None:
    """The decoder of a dataset's videos, with what decides their pixels; None without videos."""
    if parts := getattr(dataset, "parts", ()):
        decoders = dict.fromkeys(map(video_decoder, parts))
        return ", ".join(decoder for decoder in decoders if decoder) or None
    if not dataset.meta.video_keys:
        return None
    backend = dataset._video_backend
    package = {"pyav": "av"}.get(backend, backend)
    return f"{backend} {version(package)} {platform.machine()}"


def weights_digest(*files: Path) -> str:
    """Digest of all tensors by name; their order in a file does not matter."""
    digest = hashlib.sha256()
    for file in files:
        saved = WeightsFile(file)
        for name in sorted(saved.names):
            tensor = saved.tensor(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def config_digest(file: Path) -> str:
    """Digest of the settings that change what the policy computes."""
    config = json.loads(file.read_text())
    kept = {
        key: value
        for key, value in config.items()
        if key not in _RUNTIME_KEYS and not key.startswith(_RUNTIME_PREFIXES)
    }
    return hashlib.sha256(_canonical(_without_folders(kept))).hexdigest()


def processor_digest(pipeline: Any) -> str:
    """Digest of a preprocessor: its steps, their settings and the normaliser's statistics."""
    return _pipeline_digest(pipeline, _settings(pipeline))


def same_processors(one: Any, other: Any) -> bool:
    """Whether two pipelines do the same.

    Tokenizers are compared by their words, not by their names: later versions of LeRobot than 0.6.1
    save a copy of the tokenizer with every checkpoint, which then has another name.
    """
    first, second = ((pipeline, _settings(pipeline)) for pipeline in (one, other))
    for pipeline, settings in (first, second):
        for step, entry in zip(pipeline.steps, settings["steps"], strict=True):
            for name, holder in _TOKENIZERS.items():
                if name in entry["config"]:
                    entry["config"][name] = _words(getattr(step, holder))
    return _pipeline_digest(*first) == _pipeline_digest(*second)


def _words(tokenizer: Any) -> list[Any]:
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # a tokenizer of actions has one of words
    rounding = [getattr(tokenizer, name, None) for name in ("scale", "min_token")]
    return [sorted(inner.get_vocab().items()), str(inner.special_tokens_map), *rounding]


def _settings(pipeline: Any) -> Any:
    settings = _without_folders(pipeline.get_config())
    for entry in settings["steps"]:
        entry["config"].pop("device", None)
    return settings


def _pipeline_digest(pipeline: Any, settings: Any) -> str:
    digest = hashlib.sha256(_canonical(settings))
    for name, tensors in sorted(pipeline.state_dict().items()):
        for key, tensor in sorted(tensors.items()):
            digest.update(f"{name} {key}".encode())
            digest.update(_bytes(tensor.to(torch.float64)))
    return digest.hexdigest()


def _without_folders(value: Any) -> Any:
    """The same settings with local paths cut to their last part: folders differ by machine."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it lies in one piece in main memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _spread(count: int, wanted: int) -> list[int]:
    """Up to `wanted` positions spread evenly over `count`."""
    return sorted({i * (count - 1) // max(wanted - 1, 1) for i in range(min(wanted, count))})
