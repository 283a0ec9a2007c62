"""Takes back what a failed step has changed before it failed, so that its start can be saved.

A step that fails has drawn batches and random numbers, and its forward pass may have changed
buffers, such as running averages. Weights, optimizer and λ change only at the end of a step.
"""

from collections.abc import Callable
from typing import Any

from craftcli.policies.lerobot.training import random_state, set_random_state


class StepStart:
    """The state between two steps, kept until the next step is done."""

    def __init__(self, policy: Any, position: Callable[[], dict[str, int]]) -> None:
        """`position` tells where the next batch begins."""
        self._policy = policy
        self._position = position
        self.keep()

    def keep(self) -> None:
        """Remember the state now: a step is done."""
        self.position = self._position()
        self._random = random_state()
        self._buffers = [buffer.detach().clone() for buffer in self._policy.buffers()]

    def put_back(self) -> None:
        """Undo what the step that failed has changed."""
        set_random_state(self._random)
        for buffer, kept in zip(self._policy.buffers(), self._buffers, strict=True):
            buffer.copy_(kept)
