"""LeRobot's side of a training run: its optimizer presets and its checkpoint layout."""

import os
import shutil
from pathlib import Path
from typing import Any

from lerobot.common.train_utils import get_step_identifier, save_checkpoint
from lerobot.configs.default import DatasetConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.optim.factory import make_optimizer_and_scheduler
from lerobot.utils.constants import CHECKPOINTS_DIR, LAST_CHECKPOINT_LINK

from craftcli.config import TrainConfig
from craftcli.policies.loading import Checkpoint


def pipeline_config(config: TrainConfig, student: Checkpoint, dataset: Any, output: Path) -> Any:
    """The run as LeRobot would describe it, so that its own commands open our checkpoints.

    `validate` is not called: it reads sys.argv again and may replace the policy.
    """
    policy_config = student.policy.config
    optimizer = policy_config.get_optimizer_preset()
    scheduler = policy_config.get_scheduler_preset()
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
        log_freq=config.log_every,
        save_freq=config.save_every,
        optimizer=optimizer,
        scheduler=scheduler,
    )


def optimizer_and_scheduler(pipeline: Any, policy: Any) -> tuple[Any, Any]:
    """The policy's own optimizer and learning-rate schedule."""
    optimizer, scheduler = make_optimizer_and_scheduler(pipeline, policy)
    return optimizer, scheduler


def write_checkpoint(
    run: Path,
    step: int,
    *,
    pipeline: Any,
    student: Checkpoint,
    optimizer: Any,
    scheduler: Any,
    extra: dict[str, str],
) -> Path:
    """Save a checkpoint in LeRobot's layout with `extra` files beside it, whole or not at all."""
    folder: Path = run / CHECKPOINTS_DIR / get_step_identifier(step, pipeline.steps)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_checkpoint(
        partial,
        step=step,
        cfg=pipeline,
        policy=student.policy,
        optimizer=optimizer,
        scheduler=scheduler,
        preprocessor=student.preprocess,
        postprocessor=student.postprocess,
        num_processes=1,
        batch_size=pipeline.batch_size,
    )
    for name, text in extra.items():
        (partial / name).write_text(text, encoding="utf-8")
    partial.rename(folder)
    _point_last_at(folder)
    return folder


def _point_last_at(folder: Path) -> None:
    """Move the `last` link in one step; LeRobot's own helper removes it first."""
    fresh = folder.with_name(f".{LAST_CHECKPOINT_LINK}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    os.replace(fresh, folder.with_name(LAST_CHECKPOINT_LINK))
