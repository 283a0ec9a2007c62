"""Retention terms: each gives the loss of one or several modes for the student."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn

from craftcli.choices import Mode
from craftcli.config.retention import DEFAULT_EPSILON
from craftcli.engine.method.losses import RetentionLoss
from craftcli.engine.retention.anchors import NumberedAnchors
from craftcli.policies.taps import is_recomputing

PROBE_ROWS = 2
"""Rows that show what a gradient reaches: whether it is 0 does not depend on how many there are.

In training mode a policy that normalises over its batch needs two.
"""


class Term(Protocol):
    """One mode, or several that share a forward pass, of holding a student to its teacher.

    A term only computes losses. `Retention` decides when, projects, merges and moves λ.
    """

    modes: tuple[Mode, ...]

    def losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The loss of each mode on the anchor batch with this number, with gradients."""
        ...

    def held_out_losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The loss of each mode that uses anchors on a numbered batch of held-out ones."""
        ...

    def probes(self) -> dict[Mode, Tensor]:
        """For each mode a scalar that depends on everything it compares, on one or two anchors.

        Its gradient shows what the mode reaches. Unlike that of the loss, it is not 0 at the
        teacher's weights. All probes of a term come from one forward pass.
        """
        ...


class RetentionTerms(Sequence[Term]):
    """The terms of a run and the anchors that they share, if any of them uses anchors."""

    def __init__(
        self,
        terms: Sequence[Term],
        anchors: NumberedAnchors | None,
        *,
        default_epsilon: float = DEFAULT_EPSILON,
        weighs_rows: bool = True,
    ) -> None:
        """`default_epsilon` is the budget of a run that names none.

        `weighs_rows` is what the terms that imitate the teacher were opened with.
        """
        self.anchors = anchors
        self.default_epsilon = default_epsilon
        self.weighs_rows = weighs_rows
        self.modes = tuple(mode for term in terms for mode in term.modes)
        self._terms = tuple(terms)

    def __len__(self) -> int:
        return len(self._terms)

    def __getitem__(self, index: int) -> Term:  # type: ignore[override]  # slices are not needed
        return self._terms[index]

    def __repr__(self) -> str:
        return f"RetentionTerms({'+'.join(self.modes)}, {self.anchors!r})"

    def losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The loss of every mode on the anchor batch with this number, with gradients."""
        return {mode: loss for term in self for mode, loss in term.losses(number).items()}

    def held_out_losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The loss of every mode that uses anchors on a numbered batch of held-out ones."""
        return {m: loss for term in self for m, loss in term.held_out_losses(number).items()}


@contextmanager
def evaluation_mode(policy: nn.Module) -> Iterator[None]:
    """Put a policy into evaluation mode, and restore the mode of every module afterwards.

    Modules with gradient checkpointing recompute only in training mode. They alone stay in it;
    their children, which hold the dropout, do not.
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
