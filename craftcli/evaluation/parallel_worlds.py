"""Several worlds of one environment that step together, in this process or in worker processes."""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from craftcli.evaluation.simulators.base import Simulation, StepResult

type Action = NDArray[Any] | None
"""None if the episode of that world is over."""

_CLOSE_TIMEOUT_S = 10.0
"""How long a process may take to close its worlds before it is terminated."""


class Worlds(Protocol):
    """Worlds that are reset and stepped together."""

    def reset(self, seeds: Sequence[int]) -> list[StepResult]:
        """Start an episode in as many worlds as there are seeds."""
        ...

    def step(self, actions: Sequence[Action]) -> list[StepResult | None]:
        """Take one action in each world; a world with no action gives None."""
        ...

    def close(self) -> None:
        """Free the resources of all worlds."""
        ...


class RestartingWorld:
    """One world that may crash: it is created on first use, and again after a crash."""

    def __init__(self, make: Callable[[], Simulation]) -> None:
        self._make = make
        self._world: Simulation | None = None

    def reset(self, seed: int) -> StepResult:
        """Start an episode."""

        def start() -> StepResult:
            self._world = self._world or self._make()
            return self._world.reset(seed)

        return self._catch_crash(start)

    def step(self, action: NDArray[Any]) -> StepResult:
        """Take one action."""
        world = self._world
        if world is None:
            raise RuntimeError("a world must be reset before it is stepped")
        if not np.isfinite(action).all():
            return StepResult(observation=None, over=True, error="the action is not finite")
        return self._catch_crash(lambda: world.step(action))

    def close(self) -> None:
        """Free the world's resources."""
        world, self._world = self._world, None
        if world is not None:
            world.close()

    def _catch_crash(self, act: Callable[[], StepResult]) -> StepResult:
        try:
            return act()
        except Exception as error:  # simulators raise anything; it fails this episode only
            self._world = None
            return StepResult(observation=None, over=True, error=f"{type(error).__name__}: {error}")


class LocalWorlds:
    """Worlds in this process, stepped one after the other."""

    def __init__(self, make: Callable[[], Simulation], count: int) -> None:
        self._worlds = [RestartingWorld(make) for _ in range(count)]

    def reset(self, seeds: Sequence[int]) -> list[StepResult]:
        """Start an episode in as many worlds as there are seeds."""
        return [world.reset(seed) for world, seed in zip(self._worlds, seeds, strict=False)]

    def step(self, actions: Sequence[Action]) -> list[StepResult | None]:
        """Take one action in each world."""
        return [
            None if action is None else world.step(action)
            for world, action in zip(self._worlds, actions, strict=False)
        ]

    def close(self) -> None:
        """Free the resources of all worlds."""
        for world in self._worlds:
            world.close()


class WorkerWorlds:
    """Worlds divided among worker processes, which simulate at the same time.

    If a process dies, its current episodes fail and the next reset starts it again.
    """

    def __init__(self, make: Callable[[], Simulation], count: int, workers: int) -> None:
        self._make = make
        self._world_counts = [len(range(i, count, workers)) for i in range(min(workers, count))]
        self._workers = [_Worker(make, worlds) for worlds in self._world_counts]

    def reset(self, seeds: Sequence[int]) -> list[StepResult]:
        """Start an episode in as many worlds as there are seeds."""
        for i, worker in enumerate(self._workers):
            if not worker.alive:
                self._workers[i] = _Worker(self._make, self._world_counts[i])
        results = self._in_all_workers("reset", list(seeds))
        return [result for result in results if result is not None]

    def step(self, actions: Sequence[Action]) -> list[StepResult | None]:
        """Take one action in each world."""
        return self._in_all_workers("step", list(actions))

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()

    def _in_all_workers(self, verb: str, values: list[Any]) -> list[StepResult | None]:
        shares = [values[i :: len(self._workers)] for i in range(len(self._workers))]
        for worker, share in zip(self._workers, shares, strict=True):
            worker.send(verb, share)
        results: list[StepResult | None] = [None] * len(values)
        for i, (worker, share) in enumerate(zip(self._workers, shares, strict=True)):
            results[i :: len(self._workers)] = worker.receive(share)
        return results


class _Worker:
    """A process with some of the worlds, and the pipe to it."""

    def __init__(self, make: Callable[[], Simulation], count: int) -> None:
        # Not forked: this process may hold a GPU and threads.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_simulate, args=(make, count, theirs), daemon=True, name="craft-simulation"
        )
        self._process.start()
        theirs.close()
        self.alive = True

    def send(self, verb: str, share: list[Any]) -> None:
        """Send a request without waiting for the answer."""
        try:
            self._pipe.send((verb, share))
        except OSError:
            self.alive = False

    def receive(self, share: list[Any]) -> list[StepResult | None]:
        """The answer to the last request; if the process is dead, a failure for every world."""
        if self.alive:
            try:
                answer: list[StepResult | None] = self._pipe.recv()
            except (EOFError, OSError):
                self.alive = False
            else:
                return answer
        self._process.join()
        error = f"the process that simulated it ended with code {self._process.exitcode}"
        crashed = StepResult(observation=None, over=True, error=error)
        return [None if value is None else crashed for value in share]

    def close(self) -> None:
        """End the process."""
        if self.alive:
            self.send("close", [])
        self._process.join(_CLOSE_TIMEOUT_S)
        if self._process.is_alive():  # its simulator hangs
            self._process.terminate()
            self._process.join()
        self._pipe.close()


def _simulate(make: Callable[[], Simulation], count: int, pipe: Connection) -> None:
    """Run in a worker process: reset and step its worlds until a request to close."""
    # Ctrl-C reaches the parent too, which then closes this process in an orderly way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worlds = LocalWorlds(make, count)
    while True:
        try:
            verb, share = pipe.recv()
        except EOFError:  # the parent process is gone
            verb, share = "close", []
        if verb == "close":
            worlds.close()
            return
        pipe.send(worlds.reset(share) if verb == "reset" else worlds.step(share))
