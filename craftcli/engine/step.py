"""One training step, in the order of the method."""

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from craftcli.engine.execution import Execution
from craftcli.engine.retention import Retention
from craftcli.policies.base import Batch, Policy
from craftcli.report.metrics import StepReport


def train_step(
    step: int,
    batches: Sequence[Batch],
    *,
    policy: Policy,
    execution: Execution,
    optimizer: Any,
    scheduler: Any,
    retention: Retention | None,
    clip_norm: float,
    data_s: float,
) -> StepReport:
    """Update the policy once with the gradients of several batches; `step` counts from 0.

    A step in which something is not finite changes neither weights nor λ, and says so.
    """
    started = time.perf_counter()
    policy.train()
    losses = [functools.partial(_task_loss, policy, batch) for batch in batches]
    loss = execution.accumulate(losses).item()
    retained = retention.apply(step) if retention else None
    # LeRobot takes 0 to mean that nothing is clipped.
    norm = execution.clip(optimizer, clip_norm if clip_norm > 0 else math.inf)
    skipped = not (math.isfinite(loss) and math.isfinite(norm)) or (
        retained is not None and not retained.finite
    )
    execution.step(optimizer, skip=skipped)
    # What this update was made with; the scheduler is about to set the next one's.
    lr = optimizer.param_groups[0]["lr"]
    if not skipped:
        _after_update(policy, scheduler)
    return StepReport(
        step=step + 1,
        loss=loss,
        grad_norm=norm,
        lr=lr,
        update_s=time.perf_counter() - started,
        data_s=data_s,
        retention=retained,
        skipped=skipped,
    )


def _task_loss(policy: Policy, batch: Batch) -> Tensor:
    loss: Tensor
    loss, _ = policy(batch)
    return loss


def _after_update(policy: Policy, scheduler: Any) -> None:
    if scheduler is not None:
        scheduler.step()
    # Some of LeRobot's policies keep averages of their own weights.
    if callable(getattr(policy, "update", None)):
        policy.update()
