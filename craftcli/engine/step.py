"""One training step, in the order of the method."""

import math
import time
from typing import Any

import torch

from craftcli.engine.retention import Retention
from craftcli.errors import CraftError
from craftcli.policies.base import Batch, Policy
from craftcli.report.metrics import RetentionReport, StepReport


def train_step(
    step: int,
    batch: Batch,
    *,
    policy: Policy,
    optimizer: Any,
    scheduler: Any,
    retention: Retention | None,
    clip_norm: float,
    data_s: float,
) -> StepReport:
    """Update the policy once; `step` counts from 0."""
    started = time.perf_counter()
    policy.train()
    task_loss, _ = policy(batch)
    task_loss.backward()
    retained = retention.apply(step) if retention else None
    norm = _clip(policy, clip_norm)
    _require_finite(step, task_loss.item(), norm, retained)
    optimizer.step()
    optimizer.zero_grad()
    # What this update was made with; the scheduler is about to set the next one's.
    lr = optimizer.param_groups[0]["lr"]
    if scheduler is not None:
        scheduler.step()
    return StepReport(
        step=step + 1,
        loss=task_loss.item(),
        grad_norm=norm,
        lr=lr,
        update_s=time.perf_counter() - started,
        data_s=data_s,
        retention=retained,
    )


def _clip(policy: Policy, clip_norm: float) -> float:
    """Clip the merged gradient; LeRobot takes 0 to mean that nothing is clipped."""
    limit = clip_norm if clip_norm > 0 else math.inf
    return torch.nn.utils.clip_grad_norm_(policy.parameters(), limit).item()


def _require_finite(step: int, loss: float, norm: float, retained: RetentionReport | None) -> None:
    """Stop before the weights are touched."""
    values = {"loss": loss, "gradient norm": norm}
    if retained:
        values["L_ret"] = retained.loss
    broken = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    if broken:
        raise CraftError(
            f"Training stopped at step {step + 1}.",
            why=f"{', '.join(broken)}; the weights were not updated with it.",
            fix="lower --lr, or check the dataset for NaN; saved checkpoints are untouched.",
        )
