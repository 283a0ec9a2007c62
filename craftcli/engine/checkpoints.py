"""Checkpoints of a run: written whole or not at all, and loaded again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from craftcli.distributed import Processes
from craftcli.engine.checkpoint_manifest import CheckpointManifest, digest_files
from craftcli.engine.execution import Execution
from craftcli.engine.run_folder import CONFIG_FILE, STATE_FILE, has_checkpoint
from craftcli.errors import CraftError
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.task_processors import save_teacher_processors
from craftcli.policies.lerobot.training import (
    checkpoint_folder,
    checkpoint_path,
    read_gathered_optimizer,
    read_optimizer,
    read_random_state,
    write_policy,
    write_random_state,
)


class SaveFailedError(CraftError):
    """A checkpoint could not be written; trying again at once would fail as well."""


def save(
    run: Path,
    step: int,
    *,
    pipeline: Any,
    student: Checkpoint,
    execution: Execution,
    optimizer: Any,
    scheduler: Any,
    description: str,
    state: dict[str, Any],
    manifest: CheckpointManifest,
) -> Path:
    """Write a checkpoint; every process must call this.

    `manifest` lacks only the digests of the checkpoint's own files.

    Raises:
        SaveFailedError: the disk is full or fails; the checkpoints before this one are unchanged.
    """
    processes = execution.processes
    gathered = _gather(execution, optimizer) if execution.sharded else None
    checkpoint = checkpoint_path(run, step, pipeline.steps)
    try:
        with checkpoint_folder(checkpoint, processes) as folder:
            write_random_state(folder, processes)
            if processes.is_first:
                write_policy(
                    folder,
                    step,
                    pipeline=pipeline,
                    student=student,
                    optimizer=optimizer,
                    scheduler=scheduler,
                    processes=processes,
                    gathered=gathered,
                )
                save_teacher_processors(student, folder)
                (folder / CONFIG_FILE).write_text(description, encoding="utf-8")
                (folder / STATE_FILE).write_text(json.dumps(state, indent=2), encoding="utf-8")
            processes.wait()
            if processes.is_first:
                replace(manifest, files=digest_files(folder)).write(folder)
    except (OSError, SafetensorError) as error:
        kept = f"craft train --resume {run} then continues from the last checkpoint before it."
        raise SaveFailedError(
            f"Cannot save step {step} to {checkpoint}.",
            why=f"{getattr(error, 'strerror', None) or error}.",
            fix="make room on the disk, or choose another one with --output. "
            + (kept if has_checkpoint(run) else "There is no earlier checkpoint."),
        ) from error
    return checkpoint


def restore(folder: Path, *, execution: Execution, optimizer: Any, scheduler: Any) -> None:
    """Load the state of the optimizer and its schedule from a checkpoint."""
    try:
        read_optimizer(folder, None if execution.sharded else optimizer, scheduler)
        if execution.sharded:
            _spread(execution, optimizer, read_gathered_optimizer(folder))
    except Exception as error:  # torch, safetensors and json raise many kinds for damaged files
        raise _incomplete(folder, error) from error


def restore_random_state(folder: Path, processes: Processes) -> None:
    """Set the random generators as this process had them at a checkpoint."""
    try:
        read_random_state(folder, processes)
    except Exception as error:  # as above
        raise _incomplete(folder, error) from error


def _incomplete(folder: Path, error: Exception) -> CraftError:
    lines = str(error).strip().splitlines()
    return CraftError(
        f"The checkpoint {folder} is incomplete or damaged.",
        why=f"{type(error).__name__}: {lines[0] if lines else 'no message'}.",
        fix="resume from another checkpoint with --from STEP, or start a new run with --policy "
        f"{folder / 'pretrained_model'}.",
    )


def _gather(execution: Execution, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The complete states of a sharded policy and its optimizer."""
    from torch.distributed.checkpoint import state_dict as distributed

    options = distributed.StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = distributed.get_model_state_dict(execution.student, options=options)
    policy = {name.removeprefix("policy."): _own(value) for name, value in model.items()}
    state = distributed.get_optimizer_state_dict(execution.student, optimizer, options=options)
    return policy, dict(state)


def _own(value: Any) -> Any:
    """A tensor that owns exactly its memory: gathered tensors may have padding."""
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _spread(execution: Execution, optimizer: Any, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint import state_dict as distributed

    options = distributed.StateDictOptions(full_state_dict=True)
    distributed.set_optimizer_state_dict(execution.student, optimizer, state, options=options)
