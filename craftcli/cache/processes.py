"""Several processes that build one cache: who they are, what each does, how they wait.

`torchrun` starts them and says in the environment how many there are. Whole chunks are shared out,
so that no two processes write the same file and the bytes do not depend on their number.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from craftcli.errors import EXIT_USAGE, CraftError

# One process may have hours of chunks left while the others wait; a dead one is noticed at once.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process among those of a build."""

    rank: int = 0
    """Number of this process, from 0."""
    world: int = 1
    """How many there are."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is not among {self.world} processes")

    @classmethod
    def from_environment(cls) -> Self:
        """What torchrun says in RANK and WORLD_SIZE; without it, one process."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        told = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")}
        try:
            return cls(rank=int(told["RANK"]), world=int(told["WORLD_SIZE"]))
        except ValueError as error:
            raise CraftError(
                "Cannot tell which process of the build this is.",
                why=f"the environment has RANK={told['RANK']!r}, "
                f"WORLD_SIZE={told['WORLD_SIZE']!r}.",
                fix="start it with torchrun -m craftcli ..., or unset both.",
                exit_code=EXIT_USAGE,
            ) from error

    @property
    def is_first(self) -> bool:
        """Whether this process makes the folder, finishes the cache and speaks to the user."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.world == 1

    def own(self, chunks: int) -> range:
        """Which of that many chunks this process writes."""
        return range(self.rank, chunks, self.world)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Be connected to the others while inside."""
        if self.alone:
            yield
            return
        import torch
        import torch.distributed as dist

        # Counts are exchanged between processors, gradients between the devices they are on.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(
                backend, rank=self.rank, world_size=self.world, timeout=_PATIENCE
            )
        except (RuntimeError, ValueError) as error:
            raise CraftError(
                f"Process {self.rank} of {self.world} cannot reach the others.",
                why=f"{str(error).splitlines()[0]}.",
                fix="start all of them with one torchrun -m craftcli ... command.",
            ) from error
        try:
            yield
        finally:
            dist.destroy_process_group()

    def agree(self, text: str) -> str:
        """The text that the first process gives, in all of them."""
        if self.alone:
            return text
        import torch.distributed as dist

        shared = [text]
        dist.broadcast_object_list(shared)
        return shared[0]

    def wait(self) -> None:
        """Go on once every process has come this far."""
        self.total(0)

    def total(self, count: int) -> int:
        """The sum of what every process gives, once all of them have given it."""
        if self.alone:
            return count
        import torch
        import torch.distributed as dist

        shared = torch.tensor(count)
        try:
            dist.all_reduce(shared)
        except RuntimeError as error:
            raise CraftError(
                f"Process {self.rank} of {self.world} stops, because another one has stopped.",
                why=f"the connection broke ({str(error).splitlines()[0]}).",
                fix="see the other's error; --resume goes on from what was saved.",
            ) from error
        return int(shared)
