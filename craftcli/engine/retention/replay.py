"""Mode replay: the policy's own loss on the old data; the baseline that needs its labels."""

import torch
from torch import Tensor, nn

from craftcli.choices import Mode
from craftcli.engine.method.losses import RetentionLoss
from craftcli.engine.retention.anchor_dataset import AnchorDataset
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.engine.retention.terms import PROBE_ROWS
from craftcli.policies.base import Policy


class Replay:
    """The policy's own loss on the dataset frames of the anchors."""

    modes: tuple[Mode, ...] = (Mode.REPLAY,)

    def __init__(self, anchors: AnchorSet, data: AnchorDataset, policy: Policy) -> None:
        self.anchors = anchors
        self._data = data
        self._policy = policy

    def losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The loss on a numbered anchor batch, in training mode as in pre-training."""
        loss, _ = self._policy(self._data.read_labelled(self.anchors.frames(number)))
        return {Mode.REPLAY: RetentionLoss(loss.float(), {})}

    def held_out_losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The loss on a numbered batch of held-out anchors."""
        loss, _ = self._policy(self._data.read_labelled(self.anchors.held_out_frames(number)))
        return {Mode.REPLAY: RetentionLoss(loss.float(), {})}

    def probes(self) -> dict[Mode, Tensor]:
        """The loss itself: its gradient is not 0 at the teacher's weights."""
        loss, _ = self._policy(self._data.read_labelled(self.anchors.frames(0)[:PROBE_ROWS]))
        return {Mode.REPLAY: loss.float()}

    def fisher(self, samples: int) -> dict[str, Tensor]:
        """The diagonal Fisher information of the trainable weights, scaled to a mean of 1.

        Sums the squared gradients of single anchors in evaluation mode; leaves no gradients behind.
        """
        parameters = {n: p for n, p in self._policy.named_parameters() if p.requires_grad}
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        frames = [
            f for n in range(-(-samples // self.anchors.batch_size)) for f in self.anchors.frames(n)
        ]
        training = self._policy.training
        self._policy.eval()
        for frame in frames[:samples]:
            loss, _ = self._policy(self._data.read_labelled([frame]))
            loss.backward()
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    total[name] += parameter.grad.square()
                    parameter.grad = None
        self._policy.train(training)
        mean = torch.stack([value.sum() for value in total.values()]).sum() / sum(
            value.numel() for value in total.values()
        )
        # Scaled, because a confident teacher has gradients of 1e-6; only their ratios matter.
        return {name: value / mean for name, value in total.items()}


def trainable_weights(policy: nn.Module) -> dict[str, Tensor]:
    """A copy of the trainable weights by name."""
    return {n: p.detach().clone() for n, p in policy.named_parameters() if p.requires_grad}
