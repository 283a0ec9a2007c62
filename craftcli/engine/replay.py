"""Rehearsing the old data with its own labels: the baseline that needs them."""

import torch
from torch import Tensor, nn

from craftcli.choices import Mode
from craftcli.engine.anchor_rows import AnchorRows
from craftcli.engine.anchors import AnchorSet
from craftcli.engine.losses import RetentionLoss
from craftcli.policies.base import Policy


class Replay:
    """The policy's own loss on the frames that the anchors were taken from."""

    modes: tuple[Mode, ...] = (Mode.REPLAY,)

    def __init__(self, anchors: AnchorSet, data: AnchorRows, policy: Policy) -> None:
        self.anchors = anchors
        self._data = data
        self._policy = policy

    def losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The loss on the anchor batch of that number, in training mode as in pre-training."""
        loss, _ = self._policy(self._data.read_labelled(self.anchors.frames(number)))
        return {Mode.REPLAY: RetentionLoss(loss.float(), {})}

    def probe(self, mode: Mode) -> Tensor:
        """A number that depends on all that is compared."""
        loss: Tensor = self.losses(0)[Mode.REPLAY].total
        return loss

    def fisher(self, samples: int) -> dict[str, Tensor]:
        """How much the loss depends on each trainable weight: its squared gradient, 1 on average.

        One anchor at a time, in evaluation mode; gradients are left empty.
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
        # A teacher that is sure of itself has gradients of 1e-6: only their proportions count.
        return {name: value / mean for name, value in total.items()}


def trainable_weights(policy: nn.Module) -> dict[str, Tensor]:
    """A copy of everything that will be trained."""
    return {n: p.detach().clone() for n, p in policy.named_parameters() if p.requires_grad}
