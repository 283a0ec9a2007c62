"""Several worlds of one environment stepped together, here or in processes of their own."""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from craftcli.evaluation.simulation import Moment, Simulation

type Action = NDArray[Any] | None
"""None for a world whose episode is over."""

_GOODBYE_S = 10.0
"""How long a process may take to close its worlds."""


class Seats(Protocol):
    """Worlds that are reset and stepped together."""

    def reset(self, seeds: Sequence[int]) -> list[Moment]:
        """Begin an episode in as many worlds as there are seeds."""
        ...

    def step(self, actions: Sequence[Action]) -> list[Moment | None]:
        """Act in each of them; nothing comes back from one that is not to act."""
        ...

    def close(self) -> None:
        """Give back what the worlds hold."""
        ...


class Seat:
    """One world that may crash: it is made when it is needed, and made anew after a crash."""

    def __init__(self, make: Callable[[], Simulation]) -> None:
        self._make = make
        self._world: Simulation | None = None

    def reset(self, seed: int) -> Moment:
        """Begin an episode."""

        def begin() -> Moment:
            self._world = self._world or self._make()
            return self._world.reset(seed)

        return self._guarded(begin)

    def step(self, action: NDArray[Any]) -> Moment:
        """Act once."""
        world = self._world
        if world is None:
            raise RuntimeError("a world is reset before it is stepped")
        if not np.isfinite(action).all():
            return Moment(observation=None, over=True, error="the action is not finite")
        return self._guarded(lambda: world.step(action))

    def close(self) -> None:
        """Give back what the world holds."""
        world, self._world = self._world, None
        if world is not None:
            world.close()

    def _guarded(self, act: Callable[[], Moment]) -> Moment:
        try:
            return act()
        except Exception as error:  # whatever a simulator raises, the episode has failed
            self._world = None
            return Moment(observation=None, over=True, error=f"{type(error).__name__}: {error}")


class LocalSeats:
    """Worlds in this process, one after the other."""

    def __init__(self, make: Callable[[], Simulation], count: int) -> None:
        self._seats = [Seat(make) for _ in range(count)]

    def reset(self, seeds: Sequence[int]) -> list[Moment]:
        """Begin an episode in as many worlds as there are seeds."""
        return [seat.reset(seed) for seat, seed in zip(self._seats, seeds, strict=False)]

    def step(self, actions: Sequence[Action]) -> list[Moment | None]:
        """Act in each of them."""
        return [
            None if action is None else seat.step(action)
            for seat, action in zip(self._seats, actions, strict=False)
        ]

    def close(self) -> None:
        """Give back what the worlds hold."""
        for seat in self._seats:
            seat.close()


class WorkerSeats:
    """Worlds shared out over processes, which all simulate at once.

    A process that dies fails the episodes that are going on in it, and is started again.
    """

    def __init__(self, make: Callable[[], Simulation], count: int, workers: int) -> None:
        self._make = make
        self._world_counts = [len(range(i, count, workers)) for i in range(min(workers, count))]
        self._workers = [_Worker(make, worlds) for worlds in self._world_counts]

    def reset(self, seeds: Sequence[int]) -> list[Moment]:
        """Begin an episode in as many worlds as there are seeds."""
        for i, worker in enumerate(self._workers):
            if not worker.alive:
                self._workers[i] = _Worker(self._make, self._world_counts[i])
        moments = self._together("reset", list(seeds))
        return [moment for moment in moments if moment is not None]

    def step(self, actions: Sequence[Action]) -> list[Moment | None]:
        """Act in each of them."""
        return self._together("step", list(actions))

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()

    def _together(self, verb: str, values: list[Any]) -> list[Moment | None]:
        shares = [values[i :: len(self._workers)] for i in range(len(self._workers))]
        for worker, share in zip(self._workers, shares, strict=True):
            worker.send(verb, share)
        moments: list[Moment | None] = [None] * len(values)
        for i, (worker, share) in enumerate(zip(self._workers, shares, strict=True)):
            moments[i :: len(self._workers)] = worker.receive(share)
        return moments


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
        """Ask for something, without waiting for it."""
        try:
            self._pipe.send((verb, share))
        except OSError:
            self.alive = False

    def receive(self, share: list[Any]) -> list[Moment | None]:
        """What came of it; a failure for every world if the process is dead."""
        if self.alive:
            try:
                answer: list[Moment | None] = self._pipe.recv()
            except (EOFError, OSError):
                self.alive = False
            else:
                return answer
        self._process.join()
        error = f"the process that simulated it ended with code {self._process.exitcode}"
        crashed = Moment(observation=None, over=True, error=error)
        return [None if asked is None else crashed for asked in share]

    def close(self) -> None:
        """End the process."""
        if self.alive:
            self.send("close", [])
        self._process.join(_GOODBYE_S)
        if self._process.is_alive():  # its simulator hangs
            self._process.terminate()
            self._process.join()
        self._pipe.close()


def _simulate(make: Callable[[], Simulation], count: int, pipe: Connection) -> None:
    """What a process does: reset and step its worlds until it is told to end."""
    # Who asks is interrupted too, and ends this one in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    seats = LocalSeats(make, count)
    while True:
        try:
            verb, share = pipe.recv()
        except EOFError:  # whoever asked is gone
            verb, share = "close", []
        if verb == "close":
            seats.close()
            return
        pipe.send(seats.reset(share) if verb == "reset" else seats.step(share))
