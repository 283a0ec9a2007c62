"""Watches a run by measurements between its steps: its best checkpoint, and when to stop early.

The rule is that of the method: learn as much as possible while the old skill is kept.

- Kept means: in closed loop, at least 95 % of the old success that the policy had before its first
  step; without environments of old tasks, a retention loss within the last ε of the run.
- Among measurements that kept the old skill, the best has the highest new success, then the lowest
  loss on new data. If none has, the best is the one that kept most.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from craftcli.distributed import Processes
from craftcli.engine.retention.terms import evaluation_mode
from craftcli.policies.lerobot.training import random_state, set_random_state

KEPT = 0.95
"""The share of the old success at the start that counts as kept."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of the policy between two steps; None for what cannot be measured."""

    old_loss: float | None = None
    """The retention loss, on anchors that are held out if there are any."""
    new_loss: float | None = None
    """The policy's own loss on data of the new task."""
    old_success: float | None = None
    """Closed-loop success in environments of old tasks."""
    new_success: float | None = None


type Evaluator = Callable[[], Figures]
"""Measures the policy that is trained, as it is now."""


class Watch:
    """Measures the policy every so many steps, and knows which checkpoint was the best."""

    def __init__(
        self,
        evaluator: Evaluator | None,
        policy: nn.Module,
        *,
        every: int,
        patience: int,
        processes: Processes,
    ) -> None:
        """`every` 0 never measures; `patience` 0 never stops."""
        if every and evaluator is None:
            raise ValueError("a run that is measured needs an evaluator")
        self._evaluator = evaluator
        self._policy = policy
        self._every = every
        self._patience = patience
        self._processes = processes
        self._start: Figures | None = None
        self._best: Figures | None = None
        self.best_step: int | None = None
        """The step of the best checkpoint; None before the first measurement."""
        self._waited = 0

    @property
    def active(self) -> bool:
        """Whether anything is measured."""
        return self._every > 0

    @property
    def exhausted(self) -> bool:
        """Whether so many measurements in a row were no better that the run should stop."""
        return self.active and 0 < self._patience <= self._waited

    def due(self, step: int, *, last: int) -> bool:
        """Whether to measure after a step; the last one of a run is always measured."""
        return self.active and (step % self._every == 0 or step == last)

    def measure_start(self) -> Figures:
        """Measure the policy before its first step: later measurements are compared with it."""
        self._start = self._measure()
        return self._start

    def measure(self, step: int, *, epsilon: float) -> Figures:
        """Measure the policy after a step; `epsilon` is the ε that it must reach in the end."""
        figures = self._measure()
        if self._best is None or self._rank(figures, epsilon) > self._rank(self._best, epsilon):
            self._best, self.best_step, self._waited = figures, step, 0
        else:
            self._waited += 1
        return figures

    def extend(self) -> None:
        """Begin to wait anew: the user has asked for more steps."""
        self._waited = 0

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {
            "start": None if self._start is None else asdict(self._start),
            "best": None if self._best is None else asdict(self._best),
            "best_step": self.best_step,
            "waited": self._waited,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._start = Figures(**state["start"]) if state["start"] else None
        self._best = Figures(**state["best"]) if state["best"] else None
        self.best_step = state["best_step"]
        self._waited = int(state["waited"])

    def _measure(self) -> Figures:
        if self._evaluator is None:
            raise AssertionError("the constructor refuses this")
        with undisturbed(self._policy):
            figures = self._evaluator()
        # Rounding may differ between processes, and all must choose the same checkpoint.
        return Figures(**json.loads(self._processes.agree(json.dumps(asdict(figures)))))

    def _rank(self, figures: Figures, epsilon: float) -> tuple[float, ...]:
        """Larger is better, item by item."""
        old, new = _high(figures.old_success, figures.old_loss), figures.new_success
        if not self._keeps(figures, epsilon):
            return (0.0, old)
        return (1.0, 0.0 if new is None else new, _high(None, figures.new_loss), old)

    def _keeps(self, figures: Figures, epsilon: float) -> bool:
        before = self._start.old_success if self._start else None
        if figures.old_success is not None and before is not None:
            return figures.old_success >= KEPT * before
        return figures.old_loss is None or figures.old_loss <= epsilon


@contextmanager
def undisturbed(policy: nn.Module) -> Iterator[None]:
    """Measure a policy that is trained: afterwards training continues as if nothing had happened.

    Random generators, buffers and the mode of every module are put back.
    """
    before = random_state()
    buffers = [buffer.detach().clone() for buffer in policy.buffers()]
    try:
        with evaluation_mode(policy):
            yield
    finally:
        for buffer, kept in zip(policy.buffers(), buffers, strict=True):
            buffer.copy_(kept)
        set_random_state(before)


def _high(success: float | None, loss: float | None) -> float:
    """A success, or a loss with its sign changed: larger is better, and NaN is worst."""
    if success is not None:
        return success
    if loss is None:
        return 0.0
    return -loss if math.isfinite(loss) else -math.inf
