"""The retention constraint, ready to be applied inside a training loop.

retention = Retention(anchors, policy, adapter, config, total_steps=1000)
...
task_loss.backward(); report = retention.apply(step); optimizer.step()
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from craftcli.cache.pooling import needs_action_tokens, pool
from craftcli.choices import LossKind, Pooling
from craftcli.config import RetentionConfig
from craftcli.engine.anchors import AnchorBatch, AnchorSet
from craftcli.engine.dual import Multiplier, epsilon_at
from craftcli.engine.losses import RetentionLoss, retention_loss
from craftcli.engine.surgery import operate_
from craftcli.policies.base import Policy, PolicyAdapter
from craftcli.report.metrics import RetentionReport


class Retention:
    """Holds a student to its teacher on anchor rows."""

    def __init__(
        self,
        anchors: AnchorSet,
        policy: Policy,
        adapter: PolicyAdapter,
        config: RetentionConfig,
        *,
        total_steps: int,
    ) -> None:
        self.anchors = anchors
        self.config = config
        self._policy = policy
        self._adapter = adapter
        self._total_steps = total_steps
        self._multiplier = Multiplier(
            value=config.lambda_init, lr=config.lambda_lr, maximum=config.lambda_max
        )

    def __repr__(self) -> str:
        return f"Retention(mode={self.config.mode}, {self._multiplier!r}, {self.anchors!r})"

    @property
    def lam(self) -> float:
        """λ now."""
        return self._multiplier.value

    def epsilon(self, step: int) -> float:
        """The budget at a step, counted from 0."""
        start, end = self.config.budget
        schedule = self.config.epsilon_schedule
        return epsilon_at(
            step, schedule=schedule, start=start, end=end, total_steps=self._total_steps
        )

    def apply(self, step: int) -> RetentionReport | None:
        """Add retention to the task gradients in `.grad`; None when this step has no turn.

        Steps count from 0 and the first has a turn. Call between `backward` and the optimizer. The
        dual step is taken here too: it depends on L_ret alone, not on what the optimizer does.
        """
        if step % self.config.retention_every:
            return None
        parameters = [p for p in self._policy.parameters() if p.requires_grad]
        task = take_gradients(parameters)
        l_ret = self.measure(step // self.config.retention_every).total
        l_ret.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        ret = take_gradients(parameters)
        lam, epsilon = self._multiplier.value, self.epsilon(step)
        merged, surgery = operate_(
            task,
            ret,
            threshold=self.config.conflict_threshold,
            project=self.config.project,
            merge=self.config.merge,
            lam=lam,
        )
        for parameter, gradient in zip(parameters, merged, strict=True):
            parameter.grad = gradient
        loss = l_ret.item()
        # A loss that is not finite is the caller's to act on, and must not reach λ.
        if math.isfinite(loss):
            self._multiplier.step(loss - epsilon)
        return RetentionReport(
            loss=loss,
            lam=lam,
            epsilon=epsilon,
            dot=surgery.dot,
            cos=surgery.cos,
            conflict=surgery.conflict and self.config.project,
            violated=loss > epsilon,
        )

    def measure(self, number: int, *, kind: LossKind | None = None) -> RetentionLoss:
        """L_ret on the anchor batch of that number, with gradients."""
        batch = self.anchors.batch(number, next(self._policy.parameters()).device)
        student = self.student_states(batch)
        return retention_loss(
            student, batch.targets, batch.mask, kind or self.config.loss, self.anchors.variances
        )

    def student_states(self, batch: AnchorBatch) -> dict[str, Tensor]:
        """The student's pooled hidden states by layer name, computed as the teacher's were.

        In evaluation mode, because dropout alone would read as drift, but with gradients.
        """
        manifest = self.anchors.manifest
        pooling = Pooling(manifest.pooling)
        with evaluation_mode(self._policy):
            features = self._adapter.features(
                self._policy,
                dict(batch.inputs),
                stack=manifest.stack,
                layers=manifest.layers,
                with_actions=needs_action_tokens(pooling),
            )
        return {
            f"{manifest.stack}.{layer}": pool(
                features.hidden[layer], features.masks, pooling
            ).vectors
            for layer in manifest.layers
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"multiplier": self._multiplier.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._multiplier.load_state_dict(state["multiplier"])


def take_gradients(parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """Move the gradients out of the parameters, without copying them."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


@contextmanager
def evaluation_mode(policy: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode restored after."""
    modes = [(module, module.training) for module in policy.modules()]
    policy.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
