"""The demo's block world as a simulation."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.demo.world import EPISODE_STEPS, NEW_COLOURS, BlockWorld
from craftcli.evaluation.simulators.base import Environment, StepResult
from craftcli.evaluation.simulators.names import ALL_COLOURS

STATE = "observation.state"


class DemoSimulation:
    """The board with one instruction; an episode succeeds if the hand rests on the block."""

    def __init__(self, colour: str, camera: str) -> None:
        self._world = BlockWorld(colour)
        self._camera = camera

    def reset(self, seed: int) -> StepResult:
        """Draw the scene of that seed."""
        seen, info = self._world.reset(seed=seed)
        return self._result(seen, info, over=False)

    def step(self, action: NDArray[Any]) -> StepResult:
        """Move the hand."""
        seen, _, over, _, info = self._world.step(action)
        return self._result(seen, info, over=over)

    def close(self) -> None:
        """Do nothing: the world holds no resources."""

    def _result(self, seen: dict[str, Any], info: dict[str, Any], *, over: bool) -> StepResult:
        observation = {
            self._camera: seen["pixels"],
            STATE: np.asarray(seen["agent_pos"], dtype=np.float32),
            "task": self._world.task,
        }
        return StepResult(observation=observation, success=bool(info["is_success"]), over=over)


def demo_environments(colours: tuple[str, ...] = ALL_COLOURS) -> list[Environment]:
    """One environment per instruction."""
    # Imports LeRobot, which the processes that simulate do without.
    from craftcli.demo.datasets import CAMERA

    return [
        Environment(
            name=f"demo:{colour}",
            make=partial(DemoSimulation, colour, CAMERA),
            max_steps=EPISODE_STEPS,
            group="new" if colour in NEW_COLOURS else "old",
        )
        for colour in colours
    ]
