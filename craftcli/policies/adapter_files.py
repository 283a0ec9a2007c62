"""Checkpoints that hold adapters only, as PEFT writes them: read, and put onto their policy."""

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
from craftcli.policies.weights import open_weights

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_BASE_PREFIX = "base_model.model."
"""How PEFT's names of the policy's tensors begin."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """The policy that adapters were trained on top of."""

    source: str
    """A folder or a Hub name."""
    revision: str | None


def base_of(folder: Path) -> Base | None:
    """The policy under a checkpoint's adapters; None when it holds a whole policy."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text("utf-8"))
        source, revision = config["base_model_name_or_path"], config.get("revision")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CraftError(
            f"The adapters of {folder} cannot be opened.",
            why=f"{file.name} cannot be read ({type(error).__name__}: {error}).",
            fix="save or download the checkpoint again.",
        ) from error
    if not source:
        raise CraftError(
            f"The adapters of {folder} cannot be opened.",
            why=f"{file.name} does not say which policy they belong to.",
            fix="write its folder or Hub name there, as base_model_name_or_path.",
        )
    return Base(source=source, revision=revision)


def attach_adapters(policy: Policy, folder: Path) -> PeftModel:
    """Put a checkpoint's adapters onto their policy, ready to be trained on."""
    # PEFT would also take a pickle, which may run code.
    with open_weights(folder / ADAPTER_WEIGHTS):
        pass
    config = PeftConfig.from_pretrained(str(folder))
    device = str(next(policy.parameters()).device)
    with quiet_peft():
        return PeftModel.from_pretrained(
            policy, str(folder), config=config, is_trainable=True, torch_device=device
        )


def adapter_state(peft: PeftModel) -> dict[str, Tensor]:
    """What a checkpoint of these adapters holds, by name."""
    with quiet_peft():
        state: dict[str, Tensor] = get_peft_model_state_dict(peft)
    return state


def as_peft_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """A policy's tensors under the names that PEFT knows them by."""
    return {f"{_BASE_PREFIX}{name}": tensor for name, tensor in state.items()}


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Without PEFT's warnings: about tensors that we check, and embeddings that LeRobot has not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
