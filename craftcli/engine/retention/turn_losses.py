"""The retention losses of one turn, on the device until the host reads them with other values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TurnLosses:
    """Mean losses of one process: of modes and layers, and of modes on held-out anchors."""

    names: tuple[str, ...]
    """Modes, and layers as `hidden.<layer>`."""
    held_out: tuple[str, ...]
    """Modes measured on held-out anchors; none in most turns."""
    values: Tensor
    """[names + held_out] float32."""

    @classmethod
    def of(cls, seen: Sequence[Mapping[str, Tensor]], held_out: Mapping[str, Tensor]) -> Self:
        """Average what each batch of anchors gave by name, and add what held-out ones gave."""
        table = torch.stack([torch.stack([s.float() for s in one.values()]) for one in seen])
        means = [table.mean(0), *(loss.view(1) for loss in held_out.values())]
        return cls(names=tuple(seen[0]), held_out=tuple(held_out), values=torch.cat(means))

    def by_name(self, values: Sequence[float]) -> tuple[dict[str, float], dict[str, float]]:
        """`values`, as the host has read them: the losses, and those on held-out anchors."""
        count = len(self.names)
        losses = dict(zip(self.names, values[:count], strict=True))
        return losses, dict(zip(self.held_out, values[count:], strict=True))
