"""Holding the student's weights to its teacher's: L2-SP, and EWC when some weights matter more."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from craftcli.choices import Mode
from craftcli.engine.losses import RetentionLoss

_REFERENCE, _IMPORTANCE = "reference/", "importance/"


class WeightDistance:
    """Half the squared distance of the trainable weights, each times its importance."""

    def __init__(
        self,
        policy: nn.Module,
        reference: Mapping[str, Tensor],
        importance: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.mode = Mode.L2SP if importance is None else Mode.EWC
        self.modes: tuple[Mode, ...] = (self.mode,)
        self._policy = policy
        self._reference = reference
        self._importance = importance

    def losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The distance now; it is the same for every anchor batch."""
        moved = [
            self._squares(name, parameter.float() - self._reference[name])
            for name, parameter in self._policy.named_parameters()
            if parameter.requires_grad
        ]
        return {self.mode: RetentionLoss(torch.stack(moved).sum() / 2, {})}

    def save(self, file: Path) -> None:
        """Keep what a resumed run can no longer see: the teacher's weights and what they matter."""
        importance = {f"{_IMPORTANCE}{n}": v for n, v in (self._importance or {}).items()}
        reference = {f"{_REFERENCE}{n}": v for n, v in self._reference.items()}
        save_file({n: v.contiguous() for n, v in {**reference, **importance}.items()}, file)

    @classmethod
    def load(cls, policy: nn.Module, file: Path, mode: Mode) -> Self:
        """What `save` has kept, for the policy as it is now."""
        device = next(policy.parameters()).device
        saved = load_file(file, device=str(device))
        parts: dict[str, dict[str, Tensor]] = {_REFERENCE: {}, _IMPORTANCE: {}}
        for name, value in saved.items():
            part, _, own = name.partition("/")
            parts[f"{part}/"][own] = value
        return cls(policy, parts[_REFERENCE], parts[_IMPORTANCE] if mode is Mode.EWC else None)

    def probe(self, mode: Mode) -> Tensor:
        """A number that depends on all that is compared."""
        parameters = [p for p in self._policy.parameters() if p.requires_grad]
        return torch.stack([p.float().sum() for p in parameters]).sum()

    def _squares(self, name: str, moved: Tensor) -> Tensor:
        squares = moved.square()
        if self._importance is not None:
            squares = squares * self._importance[name]
        return squares.sum()
