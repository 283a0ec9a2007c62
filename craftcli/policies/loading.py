"""Opening a LeRobot checkpoint: policy, processors, and the proof that its weights were loaded."""

import contextlib
import io
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from huggingface_hub import snapshot_download
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from safetensors import SafetensorError, safe_open

# Registers the demo's policy type with LeRobot, so that its checkpoints open like any other.
from craftcli.demo import configuration_tiny_pi0_fast as _registered  # noqa: F401
from craftcli.errors import CraftError
from craftcli.policies.base import Policy, PolicyAdapter
from craftcli.policies.hub import HUB_ERRORS, reason
from craftcli.policies.registry import adapter_for

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened LeRobot checkpoint."""

    policy: Policy
    preprocess: Any
    """LeRobot's pipeline from a dataset batch to model inputs, with the checkpoint's statistics."""
    postprocess: Any
    adapter: PolicyAdapter
    folder: Path
    source: str
    """What the user wrote: a folder or a Hub name."""
    revision: str | None

    @property
    def policy_type(self) -> str:
        """LeRobot's name of the policy family."""
        name: str = self.policy.config.type
        return name


def load_checkpoint(source: str, *, device: str, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint folder (or a run, or a Hub name) and check that every weight arrived."""
    folder = resolve_checkpoint(source, revision=revision)
    config = _load_config(folder, source)
    config.device = device
    config.pretrained_path = str(folder)
    adapter = adapter_for(config.type)
    try:
        # LeRobot prints while loading; standard output belongs to the command's data.
        with contextlib.redirect_stdout(io.StringIO()):
            policy = get_policy_class(config.type).from_pretrained(str(folder), config=config)
        preprocess, postprocess = make_pre_post_processors(
            config,
            pretrained_path=str(folder),
            preprocessor_overrides={
                "device_processor": {"device": device},
                **adapter.processor_overrides(config),
            },
        )
    except Exception as error:  # whatever LeRobot, transformers and the Hub raise for one fact
        raise _incomplete(source, error) from error
    check_weights(policy.state_dict(), folder / WEIGHTS_FILE, adapter)
    policy.to(device)
    return Checkpoint(
        policy=policy,
        preprocess=preprocess,
        postprocess=postprocess,
        adapter=adapter,
        folder=folder,
        source=source,
        revision=revision,
    )


def resolve_checkpoint(source: str, *, revision: str | None = None) -> Path:
    """The folder that holds config.json and the weights: given, inside a run, or from the Hub."""
    given = Path(source).expanduser()
    for folder in (given, given / "pretrained_model", given / "checkpoints/last/pretrained_model"):
        if (folder / "config.json").is_file():
            return folder.resolve()
    if given.exists() or source.startswith((".", "/", "~")):
        raise CraftError(
            f"No policy at {source}.",
            why="it holds no config.json, nor does its checkpoints/last/pretrained_model.",
            fix="give --policy a LeRobot checkpoint folder, a run, or a Hub name.",
        )
    try:
        return Path(snapshot_download(source, revision=revision))
    except HUB_ERRORS as error:
        raise CraftError(
            f"Cannot open the policy {source!r}.",
            why=reason(error),
            fix="check the name, or give the folder of a downloaded checkpoint.",
        ) from error


def check_weights(state: Mapping[str, torch.Tensor], file: Path, adapter: PolicyAdapter) -> None:
    """Compare every tensor of the policy with the file, because LeRobot may hide a failed load.

    pi0_fast's `from_pretrained` swallows loading errors and returns random weights.
    """
    missing, different, loaded_storage = [], [], set()
    with _open_weights(file) as saved:
        names = set(saved.keys())
        for name, tensor in state.items():
            own, other = name.removeprefix("model."), adapter.saved_name(name)
            spellings = (name, own, other, other.removeprefix("model."))
            key = next((k for k in spellings if k in names), None)
            if key is None:
                missing.append(name)
                continue
            if not _same(tensor.cpu(), saved.get_tensor(key).to(tensor.dtype)):
                different.append(name)
            loaded_storage.add(tensor.untyped_storage().data_ptr())
    # Tied weights are saved once, under one of their names.
    missing = [n for n in missing if state[n].untyped_storage().data_ptr() not in loaded_storage]
    if missing or different:
        bad = (missing + different)[:3]
        raise CraftError(
            f"The weights of {file} did not load completely.",
            why=f"{len(missing)} tensors are missing and {len(different)} differ, "
            f"such as {', '.join(bad)}.",
            fix="use a checkpoint saved by the same LeRobot version and policy type.",
        )


def _incomplete(source: str, error: Exception) -> CraftError:
    cause: BaseException = error
    while cause.__cause__ is not None:  # LeRobot wraps the telling error in vague ones
        cause = cause.__cause__
    lines = str(cause).strip().splitlines()
    return CraftError(
        f"The policy {source} cannot be opened.",
        why=f"{type(cause).__name__}: {lines[0] if lines else 'no message'}",
        fix="check that the folder holds the weights, configuration and processors that LeRobot "
        "saved, and that tokenizers it names are on disk or on the Hub with your access "
        "(hf auth login).",
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all values are equal; NaN equals NaN, or broken weights would look unloaded."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _open_weights(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise CraftError(
            f"The weights {file} cannot be read.",
            why=f"{error}.",
            fix="save or download the checkpoint again.",
        ) from error


def _load_config(folder: Path, source: str) -> Any:
    try:
        # LeRobot leaves a copy of the configuration in the folder for temporary files.
        with tempfile.TemporaryDirectory() as scratch, patch.object(tempfile, "tempdir", scratch):
            return PreTrainedConfig.from_pretrained(str(folder))
    except Exception as error:  # draccus raises many kinds for one fact: it cannot be parsed
        raise CraftError(
            f"Cannot read the policy configuration of {source}.",
            why=f"{folder / 'config.json'}: {error}",
            fix="check that the checkpoint was saved by LeRobot 0.6.",
        ) from error
