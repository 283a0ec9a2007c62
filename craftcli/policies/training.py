"""LeRobot's side of a training run: its optimizer presets and its checkpoint layout."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lerobot.common.train_utils import get_step_identifier, save_checkpoint
from lerobot.configs.default import DatasetConfig, PeftConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.optim.factory import make_optimizer_and_scheduler
from lerobot.optim.optimizers import load_optimizer_state, load_optimizer_state_dict
from lerobot.optim.schedulers import (
    CosineAnnealingWithWarmupSchedulerConfig,
    load_scheduler_state,
)
from lerobot.utils.constants import CHECKPOINTS_DIR, LAST_CHECKPOINT_LINK, TRAINING_STATE_DIR
from lerobot.utils.random_utils import load_rng_state, save_rng_state

from craftcli.cache.processes import Processes
from craftcli.choices import LrSchedule
from craftcli.config import TrainConfig
from craftcli.policies.adapter_files import as_peft_names, quiet_peft
from craftcli.policies.loading import Checkpoint


def pipeline_config(config: TrainConfig, student: Checkpoint, dataset: Any, output: Path) -> Any:
    """The run as LeRobot would describe it, so that its own commands open our checkpoints.

    `validate` is not called: it reads sys.argv again and may replace the policy.
    """
    policy_config = student.policy.config
    optimizer = policy_config.get_optimizer_preset()
    scheduler = _scheduler(config.lr_schedule, policy_config)
    if config.lr is not None:
        if hasattr(scheduler, "peak_lr"):
            # The decay keeps its proportion to the peak.
            scheduler.decay_lr *= config.lr / scheduler.peak_lr
            scheduler.peak_lr = config.lr
        optimizer.lr = config.lr
    return TrainPipelineConfig(
        dataset=DatasetConfig(repo_id=dataset.repo_id, root=str(dataset.root)),
        policy=policy_config,
        output_dir=output,
        seed=config.seed,
        num_workers=config.workers,
        batch_size=config.batch_size,
        steps=config.steps,
        rename_map=student.renames,
        log_freq=config.log_every,
        save_freq=config.save_every,
        optimizer=optimizer,
        scheduler=scheduler,
        peft=_peft_config(student),
    )


def _scheduler(schedule: LrSchedule, policy_config: Any) -> Any:
    match schedule:
        case LrSchedule.PRESET:
            return policy_config.get_scheduler_preset()
        case LrSchedule.CONSTANT:
            return None
        case LrSchedule.COSINE:
            return CosineAnnealingWithWarmupSchedulerConfig(num_warmup_steps=0)


def _peft_config(student: Checkpoint) -> Any:
    """The adapters as LeRobot describes them; with this it saves them instead of the policy."""
    if student.peft is None:
        return None
    adapters = student.peft.active_peft_config
    targets = adapters.target_modules
    return PeftConfig(
        method_type=adapters.peft_type.value,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
        full_training_modules=adapters.modules_to_save,
        r=adapters.r,
        lora_alpha=adapters.lora_alpha,
    )


def optimizer_and_scheduler(pipeline: Any, policy: Any) -> tuple[Any, Any]:
    """The policy's own optimizer and learning-rate schedule."""
    optimizer, scheduler = make_optimizer_and_scheduler(pipeline, policy)
    return optimizer, scheduler


@contextmanager
def checkpoint_folder(
    run: Path, step: int, total_steps: int, processes: Processes
) -> Iterator[Path]:
    """Where every process writes its part of a checkpoint; it appears whole or not at all."""
    folder: Path = run / CHECKPOINTS_DIR / get_step_identifier(step, total_steps)
    partial = folder.with_name(f".{folder.name}.partial")
    if processes.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    processes.wait()
    yield partial
    processes.wait()
    if processes.is_first:
        if folder.exists():  # a run that went on from an earlier one comes by again
            shutil.rmtree(folder)
        partial.rename(folder)
        _point_last_at(folder)
    processes.wait()


def write_policy(
    folder: Path,
    step: int,
    *,
    pipeline: Any,
    student: Checkpoint,
    optimizer: Any,
    scheduler: Any,
    processes: Processes,
    gathered: tuple[dict[str, Any], dict[str, Any]] | None,
) -> None:
    """Write a checkpoint in LeRobot's layout; `gathered` are the states of a sharded policy."""
    model_state, optimizer_state = gathered or (None, None)
    if student.peft is not None and model_state is not None:
        model_state = as_peft_names(model_state)
    with nullcontext() if student.peft is None else quiet_peft():
        save_checkpoint(
            folder,
            step=step,
            cfg=pipeline,
            policy=student.trained,
            optimizer=optimizer,
            scheduler=scheduler,
            preprocessor=student.preprocess,
            postprocessor=student.postprocess,
            num_processes=processes.world,
            batch_size=pipeline.batch_size,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
        )


def write_random_state(folder: Path, processes: Processes) -> None:
    """Write this process's random state; that of the first is part of LeRobot's layout."""
    if not processes.is_first:
        own = folder / TRAINING_STATE_DIR / f"rank_{processes.rank}"
        own.mkdir(parents=True)
        save_rng_state(own)


def read_random_state(folder: Path, processes: Processes) -> None:
    """Go on with the random state that this process had."""
    own = "" if processes.is_first else f"rank_{processes.rank}"
    load_rng_state(folder / TRAINING_STATE_DIR / own)


def read_optimizer(folder: Path, optimizer: Any, scheduler: Any) -> None:
    """Go on with the state of the optimizer, unless it is sharded, and of its schedule."""
    if optimizer is not None:
        load_optimizer_state(optimizer, folder / TRAINING_STATE_DIR)
    if scheduler is not None:
        load_scheduler_state(scheduler, folder / TRAINING_STATE_DIR)


def read_gathered_optimizer(folder: Path) -> dict[str, Any]:
    """The state of a sharded policy's optimizer, whole."""
    state: dict[str, Any] = load_optimizer_state_dict(folder / TRAINING_STATE_DIR)
    return state


def _point_last_at(folder: Path) -> None:
    """Move the `last` link in one step; LeRobot's own helper removes it first."""
    fresh = folder.with_name(f".{LAST_CHECKPOINT_LINK}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    os.replace(fresh, folder.with_name(LAST_CHECKPOINT_LINK))
