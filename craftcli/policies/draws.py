"""What a policy would draw at random, drawn from a seed a row.

Generators live on the CPU, so that a row's values depend neither on the device nor on the rows
that it is batched with.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def row_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """A generator for every row."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def normal_rows(generators: Sequence[torch.Generator], shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise [B, *shape]."""
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


def integer_rows(generators: Sequence[torch.Generator], below: int) -> Tensor:
    """One whole number [B] from 0 up to and without `below`."""
    return torch.cat([torch.randint(below, (1,), generator=generator) for generator in generators])
