"""The interface of a simulator: one world, reset by a seed and stepped by actions.

Nothing here imports torch or LeRobot, so that processes that only simulate start quickly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

type Observation = dict[str, Any]
"""The policy's inputs by name: vectors, images ([H, W, 3] uint8, or [3, H, W] float in 0..1), and
the instruction as `task`."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a world returns after a reset or a step."""

    observation: Observation | None
    """None if the world has crashed."""
    success: bool = False
    over: bool = False
    """The episode has ended: further steps cannot change its success."""
    error: str | None = None
    """Why the world crashed."""


class Simulation(Protocol):
    """One world."""

    def reset(self, seed: int) -> StepResult:
        """Start the episode of that seed; the same seed gives the same episode."""
        ...

    def step(self, action: NDArray[Any]) -> StepResult:
        """Take one action."""
        ...

    def close(self) -> None:
        """Free the world's resources."""
        ...


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A task in which policies are rolled out; it can be pickled and sent to other processes."""

    name: str
    """Unique, such as metaworld:reach-v3."""
    make: Callable[[], Simulation]
    max_steps: int
    """An episode without success after so many steps has failed."""
    group: str | None = None
    """`old` or `new` if the task is known to show that skill."""
