"""What a retention term is: something that gives losses for the student on anchors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn

from craftcli.choices import Mode
from craftcli.engine.losses import RetentionLoss
from craftcli.policies.memory import is_recomputing


class Term(Protocol):
    """One way, or several computed together, of holding a student to its teacher.

    Cadence, surgery, merging, the multiplier and logging are the engine's.
    """

    modes: tuple[Mode, ...]

    def losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The loss of each mode on the anchor batch of that number, with gradients."""
        ...

    def probe(self, mode: Mode) -> Tensor:
        """A number that depends on all that a mode compares, to see which parameters it reaches."""
        ...


@contextmanager
def evaluation_mode(policy: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode restored after.

    Modules that would recompute in the backward pass to save memory only do so in training mode:
    they alone stay in it, and their children, which hold the dropout, do not.
    """
    modes = [(module, module.training) for module in policy.modules()]
    policy.eval()
    for module, training in modes:
        if training and is_recomputing(module):
            module.training = True
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
