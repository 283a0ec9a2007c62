"""The proof that what a file holds is what a policy computes with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from craftcli.errors import CraftError
from craftcli.policies.base import PolicyAdapter


def check_weights(state: Mapping[str, torch.Tensor], file: Path, adapter: PolicyAdapter) -> None:
    """Compare every tensor of the policy with the file, because LeRobot may hide a failed load.

    pi0_fast's `from_pretrained` swallows loading errors and returns random weights.
    """
    missing, different, loaded_storage = [], [], set()
    with open_weights(file) as saved:
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


def open_weights(file: Path) -> Any:
    """A safetensors file, open for reading."""
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise CraftError(
            f"The weights {file} cannot be read.",
            why=f"{error}.",
            fix="save or download the checkpoint again.",
        ) from error


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all values are equal; NaN equals NaN, or broken weights would look unloaded."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
