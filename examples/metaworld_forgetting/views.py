"""What a policy reads of a Meta-World task: its state, and the state again or the task's number."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.evaluation.simulators.base import Simulation, StepResult
from craftcli.evaluation.simulators.metaworld import STATE_SIZE, MetaWorld
from craftcli.evaluation.simulators.names import metaworld_instructions

STATE, WORLD, ACTION = "observation.state", "observation.environment_state", "action"
VECTORS = {STATE: STATE_SIZE, WORLD: STATE_SIZE}
"""The same twice: some of LeRobot's policies read only the first, others insist on the second."""
ACTION_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class View:
    """The two vectors that a policy reads."""

    numbered: tuple[str, ...] = ()
    """Tasks whose number, one-hot, is the second vector. Without any, it is the state again."""

    @property
    def vectors(self) -> dict[str, int]:
        """The size of each vector."""
        return {**VECTORS, WORLD: len(self.numbered)} if self.numbered else VECTORS

    def worlds(self, task: str) -> Callable[[], Simulation]:
        """Makes worlds of a task."""
        instruction = metaworld_instructions()[task]
        if not self.numbered:
            return partial(MetaWorld, task, instruction=instruction, vectors=VECTORS)
        one_hot = np.eye(len(self.numbered), dtype=np.float32)[self.numbered.index(task)]
        return partial(NumberedTask, task, instruction=instruction, one_hot=one_hot)


class NumberedTask:
    """A task that tells its number beside its state."""

    def __init__(self, task: str, *, instruction: str, one_hot: NDArray[np.float32]) -> None:
        self._world = MetaWorld(task, instruction=instruction, vectors={STATE: STATE_SIZE})
        self._one_hot = one_hot

    def reset(self, seed: int) -> StepResult:
        """Draw objects and goal from the seed."""
        return self._with_number(self._world.reset(seed))

    def step(self, action: NDArray[Any]) -> StepResult:
        """Take one action."""
        return self._with_number(self._world.step(action))

    def close(self) -> None:
        """Free the world's resources."""
        self._world.close()

    def _with_number(self, result: StepResult) -> StepResult:
        if result.observation is not None:
            result.observation[WORLD] = self._one_hot
        return result
