"""Checking that a policy computes with the weights of its file, and with all of them."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from craftcli.errors import CraftError
from craftcli.policies.base import PolicyAdapter

_log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
_SHARDS = "pytorch_model_fsdp_0"
"""Where LeRobot's sharded training saves with --checkpoint_format dcp, in no other file."""
_WINDOW = 2**24
"""Bytes of a file that are read before it is opened again."""
_AVERAGED = "_ema"
"""What LeRobot adds to the name of a policy's folder for the average of its weights (EMA)."""


def refuse_shards(folder: Path) -> None:
    """Say how weights that sharded training saved in pieces become a file that opens."""
    if (folder / _SHARDS).is_dir() and not (folder / WEIGHTS_FILE).exists():
        raise CraftError(
            f"The weights of {folder} are saved in shards, which craft does not open.",
            why=f"there is {_SHARDS}, of training with --checkpoint_format dcp, and no "
            f"{WEIGHTS_FILE}.",
            fix=f"join them with lerobot-convert-dcp --checkpoint_dir={folder} (of the LeRobot "
            "that trained the policy), then run the command again.",
        )


def note_averaged(folder: Path) -> None:
    """Say that a checkpoint has averaged weights beside those that are taken."""
    averaged = folder.with_name(folder.name + _AVERAGED)
    if (averaged / WEIGHTS_FILE).is_file():
        _log.warning(
            "Taking the weights as they were trained, of %s. The checkpoint has their moving "
            "average (EMA) too: --policy %s takes that.",
            folder,
            averaged,
        )


def check_weights(state: Mapping[str, torch.Tensor], file: Path, adapter: PolicyAdapter) -> None:
    """Compare every tensor of the policy with the file, because LeRobot may hide a failed load.

    pi0_fast's `from_pretrained` swallows loading errors and returns random weights.
    """
    missing, different, loaded_storage = [], [], set()
    known: set[str] = set()
    saved = WeightsFile(file)
    names = set(saved.names)
    for name, tensor in state.items():
        own, other = name.removeprefix("model."), adapter.saved_name(name)
        spellings = (name, own, other, other.removeprefix("model."))
        known.update(spellings)
        key = next((k for k in spellings if k in names), None)
        if key is None:
            missing.append(name)
            continue
        if not _same(tensor.cpu(), saved.tensor(key).to(tensor.dtype)):
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
    _check_unused(sorted(names - known), known, file)


def _check_unused(unused: list[str], known: set[str], file: Path) -> None:
    """Refuse weights of more layers than the policy has; name other weights that it does not use.

    Published checkpoints hold tensors that their policies do not need, such as copies of tied ones.
    """
    kinds = {_kind(name) for name in known}
    layers = [name for name in unused if _kind(name) in kinds]
    if layers:
        raise CraftError(
            f"The policy is smaller than its weights {file}.",
            why=f"{len(layers)} tensors belong to layers that config.json does not count, such as "
            f"{', '.join(layers[:3])}.",
            fix="put the config.json back that was saved with these weights.",
        )
    if unused:
        named = ", ".join(repr(name[:100]) for name in unused[:3])
        _log.warning("%d tensors of %s are not used, such as %s.", len(unused), file, named)


def _kind(name: str) -> str:
    """The name of a tensor without the numbers of its layers."""
    return re.sub(r"\d+", "#", name)


class WeightsFile:
    """A safetensors file whose tensors are read one by one and take memory only while in use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened = open_weights(path)
        self._bytes = 0
        self.names: tuple[str, ...] = tuple(self._opened.keys())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the file."""
        tensor: torch.Tensor = self._opened.get_tensor(name)
        self._bytes += tensor.nbytes
        if self._bytes > _WINDOW:
            # The file is mapped into memory, and what was read of it stays there until it is
            # closed: opened again, this tensor alone keeps its part.
            self._opened, self._bytes = open_weights(self._path), 0
        return tensor

    def outline(self, name: str) -> torch.Tensor:
        """The shape and the dtype of a tensor, as a tensor without values."""
        return torch.empty_like(self._opened.get_tensor(name), device="meta")


def open_weights(file: Path) -> Any:
    """Open a safetensors file for reading."""
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise CraftError(
            f"The weights {file} cannot be read.",
            why=f"{error}.",
            fix="save or download the checkpoint again.",
        ) from error


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all values are equal. NaN equals NaN: weights with NaN were loaded, too."""
    if one.shape != other.shape:
        return False
    # `equal` needs no memory, but NaN differs from NaN there.
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
