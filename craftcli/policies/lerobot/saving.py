"""Writes checkpoints in LeRobot's layout, and reads the optimizer of one.

LeRobot's own `save_checkpoint` and its readers change between versions: 0.6.2 has other arguments,
and some are gone. The files stay the same. The bytes written here are those of LeRobot 0.6.1.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from lerobot.optim.schedulers import save_scheduler_state
from lerobot.utils.constants import (
    OPTIMIZER_PARAM_GROUPS,
    OPTIMIZER_STATE,
    PRETRAINED_MODEL_DIR,
    TRAINING_STATE_DIR,
    TRAINING_STEP,
)
from lerobot.utils.random_utils import save_rng_state
from safetensors.torch import load_file, save_file
from torch import Tensor

from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.lora_files import as_peft_names, quiet_peft

_SEPARATOR = "/"
"""Joins the keys of nested states in a safetensors file, as LeRobot does."""


def step_name(step: int, total_steps: int) -> str:
    """The folder of the checkpoint after a step: at least six digits."""
    digits = max(6, len(str(total_steps)))
    return f"{step:0{digits}d}"


def write_pretrained(
    folder: Path, student: Checkpoint, pipeline: Any, state: Mapping[str, Tensor] | None
) -> None:
    """Write the policy, its processors and LeRobot's description of the run.

    `state` holds the complete weights of a sharded policy.
    """
    place = folder / PRETRAINED_MODEL_DIR
    if student.peft is None:
        write_weights(student.policy, place, state)
    else:
        with quiet_peft():
            named = None if state is None else as_peft_names(state)
            student.peft.save_pretrained(place, state_dict=named)
    pipeline.save_pretrained(place)
    if student.peft is not None:
        # PEFT writes its own configuration, not the policy's.
        student.policy.config.save_pretrained(place)
    student.preprocess.save_pretrained(place)
    student.postprocess.save_pretrained(place)


def write_weights(policy: Any, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write a policy's configuration and weights; `state` are weights that replace its own."""
    if state is None:
        policy.save_pretrained(folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    policy.config.save_pretrained(folder)
    # Above the total size, so that it is one file.
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    save_torch_state_dict(dict(state), str(folder), max_shard_size=max(total, 1))


def write_training_state(
    folder: Path,
    step: int,
    *,
    optimizer: Any,
    scheduler: Any,
    processes: int,
    batch_size: int,
    optimizer_state: Mapping[str, Any] | None,
) -> None:
    """Write what a resumed run needs besides the policy.

    `optimizer_state` is the complete state of a sharded optimizer.
    """
    place = folder / TRAINING_STATE_DIR
    place.mkdir(parents=True, exist_ok=True)
    counts = {"step": step, "num_processes": processes, "batch_size": batch_size}
    _write_json(place / TRAINING_STEP, counts)
    save_rng_state(place)
    state = dict(optimizer.state_dict() if optimizer_state is None else optimizer_state)
    groups = state.pop("param_groups")
    save_file(_flat(state), place / OPTIMIZER_STATE)
    _write_json(place / OPTIMIZER_PARAM_GROUPS, groups)
    if scheduler is not None:
        save_scheduler_state(scheduler, place)


def read_optimizer_state(folder: Path) -> dict[str, Any]:
    """The optimizer's state by names of parameters, as a sharded run wrote it."""
    place = folder / TRAINING_STATE_DIR
    groups = json.loads((place / OPTIMIZER_PARAM_GROUPS).read_text("utf-8"))
    state = _nested(load_file(place / OPTIMIZER_STATE)).get("state", {})
    return {"state": state, "param_groups": groups}


def _flat(nested: Mapping[Any, Any], start: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{start}{_SEPARATOR}{key}" if start else str(key)
        found |= _flat(value, name) if isinstance(value, Mapping) else {name: value}
    return found


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(_SEPARATOR)
        inner = found
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return found


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=4, ensure_ascii=False), encoding="utf-8")
