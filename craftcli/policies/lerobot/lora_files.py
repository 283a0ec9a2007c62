"""Checkpoints that hold only LoRA weights, in PEFT's files: reading them, attaching them."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from torch import Tensor

from craftcli.errors import CraftError
from craftcli.policies.base import Policy
from craftcli.policies.lerobot.weight_files import open_weights

LORA_CONFIG = "adapter_config.json"
LORA_WEIGHTS = "adapter_model.safetensors"
_BASE_PREFIX = "base_model.model."
"""PEFT puts this before the names of the policy's tensors."""


@dataclass(frozen=True, kw_only=True)
class BasePolicy:
    """The policy that LoRA weights were trained on."""

    source: str
    """A folder or a Hub name."""
    revision: str | None


def base_of(folder: Path) -> BasePolicy | None:
    """The policy under a checkpoint's LoRA weights; None if the checkpoint is a whole policy."""
    file = folder / LORA_CONFIG
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text("utf-8"))
        source, revision = config["base_model_name_or_path"], config.get("revision")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CraftError(
            f"Cannot open the LoRA weights of {folder}.",
            why=f"{file.name} cannot be read ({type(error).__name__}: {error}).",
            fix="save or download the checkpoint again.",
        ) from error
    if not source:
        raise CraftError(
            f"Cannot open the LoRA weights of {folder}.",
            why=f"{file.name} does not name the policy that they belong to.",
            fix="write its folder or Hub name there, as base_model_name_or_path.",
        )
    return BasePolicy(source=source, revision=revision)


def attach_lora(policy: Policy, folder: Path) -> PeftModel:
    """Attach a checkpoint's LoRA weights to their policy, ready for further training."""
    # Fails unless it is a safetensors file: PEFT would also load a pickle, which can run code.
    with open_weights(folder / LORA_WEIGHTS):
        pass
    config = PeftConfig.from_pretrained(str(folder))
    device = str(next(policy.parameters()).device)
    with quiet_peft():
        return PeftModel.from_pretrained(
            policy, str(folder), config=config, is_trainable=True, torch_device=device
        )


def lora_state(peft: PeftModel) -> dict[str, Tensor]:
    """The tensors of a checkpoint with these LoRA weights, by name."""
    with quiet_peft():
        state: dict[str, Tensor] = get_peft_model_state_dict(peft)
    return state


def as_peft_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """A policy's tensors under PEFT's names."""
    return {f"{_BASE_PREFIX}{name}": tensor for name, tensor in state.items()}


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Hide PEFT's warnings.

    They are about missing tensors, which craft checks itself, and about resized embeddings, which
    LeRobot's policies do not have.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
