"""One training step, in the order of the method.

1. L_task and its gradient, over one or several batches.
2. Retention (`Retention.merge`): L_ret and its gradient, projection, merge
   (`method/projection.py`). In steps that project nothing, one backward pass computes the merged
   gradient (`Retention.join`).
3. Clip the merged gradient once. Read loss, norm and L_ret, whose values may forbid the update.
   Then the optimizer step and the learning-rate schedule.
4. The step of the multiplier λ (`method/constraint.py`), and the report.
"""

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from craftcli.engine.execution import Execution
from craftcli.engine.metrics import RetentionReport, StepReport
from craftcli.engine.retention.retention import Retention
from craftcli.engine.retention.turn_losses import TurnLosses
from craftcli.engine.transfers import read_together
from craftcli.policies.base import Batch, Policy


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
    """Update the policy once from the gradients of all batches; `step` counts from 0.

    A step with a value that is not finite is skipped: it changes neither the weights nor λ.
    """
    started = time.perf_counter()
    waited = retention.waited_s if retention else 0.0
    policy.train()
    works = [functools.partial(_task_loss, policy, batch) for batch in batches]
    retained: RetentionReport | None = None
    joined: TurnLosses | None = None
    if retention and retention.joins(step):
        mean, joined = retention.join(step, works)
    else:
        mean = execution.accumulate(works)
        retained = retention.merge(step) if retention else None
    means = mean.view(1) if joined is None else torch.cat([mean.view(1), joined.values])
    # A limit of 0 means no clipping in LeRobot.
    limit = clip_norm if clip_norm > 0 else math.inf
    (norm,), (loss, *turn) = read_together(*execution.clip(optimizer, limit, means))
    if retention and joined:
        retained = retention.report(step, joined, turn)
    skipped = not (math.isfinite(loss) and math.isfinite(norm)) or (
        retained is not None and not retained.finite
    )
    execution.step(optimizer, skip=skipped)
    # Read before the scheduler sets the learning rate of the next step.
    lr = optimizer.param_groups[0]["lr"]
    if not skipped:
        _after_update(policy, scheduler)
        if retention and retained:
            retained = retention.update(step, retained)
    return StepReport(
        step=step + 1,
        loss=loss,
        grad_norm=norm,
        lr=lr,
        update_s=time.perf_counter() - started,
        data_s=data_s,
        anchor_s=retention.waited_s - waited if retention else 0.0,
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
    # Some of LeRobot's policies keep a running average of their weights.
    if callable(getattr(policy, "update", None)):
        policy.update()
