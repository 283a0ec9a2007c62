"""Several processes that work on one cache or one run: their ranks, shares and barriers.

`torchrun` starts them and puts their number into the environment. A build divides whole chunks
among them: no two processes write the same file, and the bytes do not depend on their number.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from craftcli.errors import EXIT_USAGE, CraftError

# One process may have hours of chunks left while the others wait. A dead one breaks the connection
# at once, so a long timeout does no harm.
_TIMEOUT = timedelta(days=30)


# How gloo and NCCL say that a process on the other side is gone.
_BROKEN = ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo", "NCCL")


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The rank of this process, and the number of processes."""

    rank: int = 0
    """Number of this process, from 0."""
    world: int = 1
    """Number of processes."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is not among {self.world} processes")

    @classmethod
    def from_environment(cls) -> Self:
        """Read RANK and WORLD_SIZE, which torchrun sets; without them, there is one process."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")}
        try:
            return cls(rank=int(found["RANK"]), world=int(found["WORLD_SIZE"]))
        except ValueError as error:
            raise CraftError(
                "The rank of this process is unknown.",
                why=f"the environment has RANK={found['RANK']!r}, "
                f"WORLD_SIZE={found['WORLD_SIZE']!r}.",
                fix="start it with torchrun -m craftcli ..., or unset both.",
                exit_code=EXIT_USAGE,
            ) from error

    @property
    def is_first(self) -> bool:
        """Whether this process creates folders, finishes the cache and prints."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.world == 1

    def own(self, chunks: int) -> range:
        """The chunks that this process writes, of `chunks` in all."""
        return range(self.rank, chunks, self.world)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to the other processes for the duration of the context.

        A context within another one uses its connection: a run that builds a cache, for instance.
        """
        if self.alone:
            yield
            return
        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            yield
            return
        # Counts are exchanged between CPUs, gradients between the devices that hold them.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(
                backend, rank=self.rank, world_size=self.world, timeout=_TIMEOUT
            )
        except (RuntimeError, ValueError) as error:
            raise CraftError(
                f"Process {self.rank} of {self.world} cannot reach the others.",
                why=f"{str(error).splitlines()[0]}.",
                fix="start all of them with one torchrun -m craftcli ... command.",
            ) from error
        try:
            with self._explained():
                yield
        finally:
            dist.destroy_process_group()

    def agree(self, text: str) -> str:
        """Return the text of the first process in all processes."""
        if self.alone:
            return text
        import torch.distributed as dist

        shared = [text]
        dist.broadcast_object_list(shared)
        return shared[0]

    def wait(self) -> None:
        """Wait until every process gets here."""
        self.total(0)

    def total(self, count: int) -> int:
        """Add up the counts of all processes; this waits for every one of them."""
        if self.alone:
            return count
        import torch
        import torch.distributed as dist

        shared = torch.tensor(count)
        with self._explained(always=True):
            dist.all_reduce(shared)
        return int(shared)

    @contextmanager
    def _explained(self, *, always: bool = False) -> Iterator[None]:
        """Turn a connection that broke, in whichever exchange, into an error that says so.

        With `always`, no other error can happen.
        """
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if not always and not any(sign in text for sign in _BROKEN):
                raise
            raise CraftError(
                f"Process {self.rank} of {self.world} stops, because another one has stopped.",
                why=f"the connection broke ({text.splitlines()[0]}).",
                fix="see the error of the other one; --resume continues from what was saved.",
            ) from error
