"""Random values that a policy would draw, drawn instead from one seed for each row.

The generators are on the CPU: the values of a row depend neither on the device nor on the other
rows of its batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def row_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One generator for each row."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def normal_rows(generators: Sequence[torch.Generator], shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise [B, *shape]."""
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


def integer_rows(generators: Sequence[torch.Generator], below: int) -> Tensor:
    """One integer for each row [B], at least 0 and less than `below`."""
    return torch.cat([torch.randint(below, (1,), generator=generator) for generator in generators])
