"""LeRobot's side of a training run: its optimizer presets and its checkpoint layout."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from lerobot.configs.default import DatasetConfig, PeftConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.optim.factory import make_optimizer_and_scheduler
from lerobot.optim.optimizers import load_optimizer_state
from lerobot.optim.schedulers import (
    CosineAnnealingWithWarmupSchedulerConfig,
    load_scheduler_state,
)
from lerobot.utils.constants import CHECKPOINTS_DIR, LAST_CHECKPOINT_LINK, TRAINING_STATE_DIR
from lerobot.utils.random_utils import (
    get_rng_state,
    load_rng_state,
    save_rng_state,
    set_rng_state,
)
from torch.optim.lr_scheduler import LambdaLR

from craftcli.choices import LrSchedule
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.saving import (
    read_optimizer_state,
    step_name,
    write_pretrained,
    write_training_state,
)
from craftcli.whole_files import move_folder, remove_leftovers, temporary_sibling, write_link


def pipeline_config(config: TrainConfig, student: Checkpoint, dataset: Any, output: Path) -> Any:
    """LeRobot's description of the run, with which its own commands open craft's checkpoints.

    LeRobot's `validate` is not called: it reads sys.argv again and may replace the policy.
    """
    policy_config = _with_learning_rate(student.policy.config, config.lr)
    optimizer = policy_config.get_optimizer_preset()
    scheduler = _scheduler(config.lr_schedule, policy_config)
    if config.lr is not None:  # for policies whose rate has another name
        if hasattr(scheduler, "peak_lr"):
            scheduler.decay_lr *= config.lr / scheduler.peak_lr
            scheduler.peak_lr = config.lr
        optimizer.lr = config.lr
    return TrainPipelineConfig(
        # Several datasets have no root; LeRobot cannot open them and says so by their names.
        dataset=DatasetConfig(
            repo_id=dataset.repo_id,
            root=None if dataset.root is None else str(Path(dataset.root).absolute()),
        ),
        policy=policy_config,
        output_dir=output.absolute(),
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


def _with_learning_rate(policy_config: Any, lr: float | None) -> Any:
    """The policy's configuration, whose presets have the learning rate of the run.

    `lerobot-train --config_path` asks them again, so that a rate noted elsewhere would be lost. It
    can be told not to ask, but then it gives all weights one rate, and xvla refuses that.
    """
    if lr is None or not hasattr(policy_config, "optimizer_lr"):
        return policy_config
    ours = copy(policy_config)
    if hasattr(ours, "scheduler_decay_lr"):
        # Keep the ratio of the final to the peak learning rate.
        ours.scheduler_decay_lr *= lr / ours.optimizer_lr
    ours.optimizer_lr = lr
    return ours


def _scheduler(schedule: LrSchedule, policy_config: Any) -> Any:
    match schedule:
        case LrSchedule.PRESET:
            return policy_config.get_scheduler_preset()
        case LrSchedule.CONSTANT:
            return None
        case LrSchedule.COSINE:
            return CosineAnnealingWithWarmupSchedulerConfig(num_warmup_steps=0)


def _peft_config(student: Checkpoint) -> Any:
    """LeRobot's description of the LoRA weights; with it, LeRobot saves them and not the policy."""
    if student.peft is None:
        return None
    lora = student.peft.active_peft_config
    targets = lora.target_modules
    return PeftConfig(
        method_type=lora.peft_type.value,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
        full_training_modules=lora.modules_to_save,
        r=lora.r,
        lora_alpha=lora.lora_alpha,
    )


def optimizer_and_scheduler(pipeline: Any, policy: Any) -> tuple[Any, Any]:
    """The optimizer and learning-rate schedule that LeRobot makes for the policy."""
    optimizer, scheduler = make_optimizer_and_scheduler(pipeline, policy)
    return optimizer, scheduler


def continue_schedule(scheduler: Any, optimizer: Any) -> None:
    """Set the learning rate that a schedule over another number of steps has at its step.

    A restored optimizer has the rate of the schedule before, and would take one step with it.
    """
    if not isinstance(scheduler, LambdaLR):  # all of LeRobot's are; None is a constant rate
        return
    parts = zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, base, share in parts:
        group["lr"] = base * share(scheduler.last_epoch)


def checkpoint_path(run: Path, step: int, total_steps: int) -> Path:
    """The folder of the checkpoint after a step, in LeRobot's layout."""
    folder: Path = run / CHECKPOINTS_DIR / step_name(step, total_steps)
    return folder


@contextmanager
def checkpoint_folder(folder: Path, processes: Processes) -> Iterator[Path]:
    """A folder in which every process writes its part of a checkpoint.

    It becomes `folder`, and the target of the `last` link, once all processes are done.
    """
    fresh = Path(processes.agree(str(temporary_sibling(folder))))
    if processes.is_first:
        remove_leftovers(folder)
        fresh.mkdir(parents=True)
    processes.wait()
    try:
        yield fresh
        processes.wait()
        if processes.is_first:
            # A resumed run may reach the step of a checkpoint that it did not start from.
            move_folder(fresh, folder, replace=True)
            # In one step; LeRobot's own helper removes the link first.
            write_link(folder.with_name(LAST_CHECKPOINT_LINK), folder.name)
    except BaseException:
        if processes.is_first:
            shutil.rmtree(fresh, ignore_errors=True)
        raise
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
    """Write a checkpoint in LeRobot's layout.

    `gathered` holds the complete states of policy and optimizer if both are sharded.
    """
    model_state, optimizer_state = gathered or (None, None)
    write_pretrained(folder, student, pipeline, model_state)
    write_training_state(
        folder,
        step,
        optimizer=optimizer,
        scheduler=scheduler,
        processes=processes.world,
        batch_size=pipeline.batch_size,
        optimizer_state=optimizer_state,
    )


def write_random_state(folder: Path, processes: Processes) -> None:
    """Write this process's random state, unless it is the first: LeRobot writes that one."""
    if not processes.is_first:
        own = folder / TRAINING_STATE_DIR / f"rank_{processes.rank}"
        own.mkdir(parents=True)
        save_rng_state(own)


def read_random_state(folder: Path, processes: Processes) -> None:
    """Restore the random state that this process had."""
    own = "" if processes.is_first else f"rank_{processes.rank}"
    load_rng_state(folder / TRAINING_STATE_DIR / own)


def random_state() -> dict[str, Any]:
    """The state of all random generators, as checkpoints have it."""
    state: dict[str, Any] = get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set all random generators to a state of `random_state`."""
    set_rng_state(state)


def read_optimizer(folder: Path, optimizer: Any, scheduler: Any) -> None:
    """Restore the states of optimizer and schedule; pass None for a sharded optimizer."""
    if optimizer is not None:
        load_optimizer_state(optimizer, folder / TRAINING_STATE_DIR)
    if scheduler is not None:
        load_scheduler_state(scheduler, folder / TRAINING_STATE_DIR)


def read_gathered_optimizer(folder: Path) -> dict[str, Any]:
    """The complete optimizer state of a sharded policy."""
    return read_optimizer_state(folder)
