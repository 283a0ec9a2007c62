"""The demo's world as a simulation."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.demo.world import EPISODE_STEPS, NEW_COLOURS, OLD_COLOURS, BlockWorld
from craftcli.evaluation.simulation import Environment, Moment

ALL_COLOURS = (*OLD_COLOURS, *NEW_COLOURS)

STATE = "observation.state"


class Blocks:
    """The board with one instruction; an episode succeeds if the hand rests on the block."""

    def __init__(self, colour: str, camera: str) -> None:
        self._world = BlockWorld(colour)
        self._camera = camera

    def reset(self, seed: int) -> Moment:
        """Draw the scene of that seed."""
        seen, info = self._world.reset(seed=seed)
        return self._moment(seen, info, over=False)

    def step(self, action: NDArray[Any]) -> Moment:
        """Move the hand."""
        seen, _, over, _, info = self._world.step(action)
        return self._moment(seen, info, over=over)

    def close(self) -> None:
        """Nothing is held."""

    def _moment(self, seen: dict[str, Any], info: dict[str, Any], *, over: bool) -> Moment:
        observation = {
            self._camera: seen["pixels"],
            STATE: np.asarray(seen["agent_pos"], dtype=np.float32),
            "task": self._world.task,
        }
        return Moment(observation=observation, success=bool(info["is_success"]), over=over)


def block_environments(colours: tuple[str, ...] = ALL_COLOURS) -> list[Environment]:
    """One environment for each instruction."""
    # Imports LeRobot, which the processes that simulate do without.
    from craftcli.demo.datasets import CAMERA

    return [
        Environment(
            name=f"demo:{colour}",
            make=partial(Blocks, colour, CAMERA),
            max_steps=EPISODE_STEPS,
            group="new" if colour in NEW_COLOURS else "old",
        )
        for colour in colours
    ]
