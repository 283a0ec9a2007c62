"""Checkpoints of a run: written whole or not at all, and read back to go on from."""

import json
from pathlib import Path
from typing import Any

from craftcli.engine.execution import Execution
from craftcli.errors import CraftError
from craftcli.policies.loading import Checkpoint
from craftcli.policies.training import (
    checkpoint_folder,
    read_gathered_optimizer,
    read_optimizer,
    write_policy,
    write_random_state,
)
from craftcli.run_files import CONFIG_FILE as CONFIG_FILE
from craftcli.run_files import STATE_FILE as STATE_FILE


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
) -> Path:
    """Write a checkpoint; every process has to call this."""
    processes = execution.processes
    gathered = _gather(execution, optimizer) if execution.sharded else None
    with checkpoint_folder(run, step, pipeline.steps, processes) as folder:
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
            (folder / CONFIG_FILE).write_text(description, encoding="utf-8")
            (folder / STATE_FILE).write_text(json.dumps(state, indent=2), encoding="utf-8")
    return folder.with_name(folder.name.removeprefix(".").removesuffix(".partial"))


def restore(folder: Path, *, execution: Execution, optimizer: Any, scheduler: Any) -> None:
    """Give the optimizer and its schedule the state of a checkpoint."""
    try:
        read_optimizer(folder, None if execution.sharded else optimizer, scheduler)
        if execution.sharded:
            _spread(execution, optimizer, read_gathered_optimizer(folder))
    except (OSError, KeyError, ValueError) as error:
        raise CraftError(
            f"The checkpoint {folder} is not whole.",
            why=f"{type(error).__name__}: {error}.",
            fix="resume from another copy of the run, or start a new one with --policy "
            f"{folder / 'pretrained_model'}.",
        ) from error


def _gather(execution: Execution, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole states of a policy and an optimizer that are spread over the processes."""
    from torch.distributed.checkpoint import state_dict as distributed

    options = distributed.StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = distributed.get_model_state_dict(execution.student, options=options)
    policy = {name.removeprefix("policy."): _own(value) for name, value in model.items()}
    state = distributed.get_optimizer_state_dict(execution.student, optimizer, options=options)
    return policy, dict(state)


def _own(value: Any) -> Any:
    """A tensor with no more memory behind it than its own: gathered ones may have padding."""
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _spread(execution: Execution, optimizer: Any, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint import state_dict as distributed

    options = distributed.StateDictOptions(full_state_dict=True)
    distributed.set_optimizer_state_dict(execution.student, optimizer, state, options=options)
