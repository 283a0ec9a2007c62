"""What craft asks of a simulator: one world that is reset by a seed and stepped by actions.

Nothing here imports torch or LeRobot, so that processes that only simulate start quickly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

type Observation = dict[str, Any]
"""What a policy reads, by its names: vectors, images ([H, W, 3] uint8, or [3, H, W] float in 0..1),
and the instruction as `task`."""

type Shapes = Mapping[str, tuple[int, ...]]
"""What a policy reads: the shape of every input by name, images as [3, H, W]."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A world after a reset or a step."""

    observation: Observation | None
    """None when the world has crashed."""
    success: bool = False
    over: bool = False
    """Nothing more will change what the episode counts as."""
    error: str | None = None
    """Why the world crashed."""


class Simulation(Protocol):
    """One world."""

    def reset(self, seed: int) -> Moment:
        """Begin the episode of that seed; the same one every time."""
        ...

    def step(self, action: NDArray[Any]) -> Moment:
        """Act once."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A task to roll policies out on; it can be sent to other processes."""

    name: str
    """Unique, as in metaworld:reach-v3."""
    make: Callable[[], Simulation]
    max_steps: int
    """An episode that has not succeeded by then has failed."""
    group: str | None = None
    """What the task is to the run: old or new, where that is known."""
