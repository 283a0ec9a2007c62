"""Modes l2sp and ewc: the distance of the student's weights from its teacher's.

    L2-SP:  L_ret = ½ Σ (θ - θ_teacher)²          Li et al., 2018, arXiv 1802.01483
    EWC:    L_ret = ½ Σ F (θ - θ_teacher)²        Kirkpatrick et al., 2017, arXiv 1612.00796

with F the diagonal Fisher information of each weight, from `Replay.fisher`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from craftcli.choices import Mode
from craftcli.engine.method.losses import RetentionLoss

_REFERENCE, _IMPORTANCE = "reference/", "importance/"


class WeightDistance:
    """Half the squared distance of the trainable weights; EWC has an `importance` per weight."""

    def __init__(
        self,
        policy: nn.Module,
        reference: Mapping[str, Tensor],
        importance: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.mode = Mode.L2SP if importance is None else Mode.EWC
        self.modes: tuple[Mode, ...] = (self.mode,)
        self.importance = importance
        self._policy = policy
        self._reference = reference

    def losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """The current distance; it does not depend on the anchor batch."""
        moved = [
            self._squares(name, parameter.float() - self._reference[name])
            for name, parameter in self._policy.named_parameters()
            if parameter.requires_grad
        ]
        return {self.mode: RetentionLoss(torch.stack(moved).sum() / 2, {})}

    def held_out_losses(self, number: int) -> dict[Mode, RetentionLoss]:
        """None: the distance of weights depends on no anchors."""
        return {}

    def save(self, file: Path) -> None:
        """Save the teacher's weights and their importance, which a resumed run cannot recompute."""
        importance = {f"{_IMPORTANCE}{n}": v for n, v in (self.importance or {}).items()}
        reference = {f"{_REFERENCE}{n}": v for n, v in self._reference.items()}
        save_file({n: v.contiguous() for n, v in {**reference, **importance}.items()}, file)

    @classmethod
    def load(cls, policy: nn.Module, file: Path, mode: Mode) -> Self:
        """The distance of a policy from the weights in a file that `save` wrote."""
        device = next(policy.parameters()).device
        saved = load_file(file, device=str(device))
        parts: dict[str, dict[str, Tensor]] = {_REFERENCE: {}, _IMPORTANCE: {}}
        for name, value in saved.items():
            part, _, own = name.partition("/")
            parts[f"{part}/"][own] = value
        return cls(policy, parts[_REFERENCE], parts[_IMPORTANCE] if mode is Mode.EWC else None)

    def probes(self) -> dict[Mode, Tensor]:
        """The sum of the trainable weights: reaches all of them."""
        parameters = [p for p in self._policy.parameters() if p.requires_grad]
        return {self.mode: torch.stack([p.float().sum() for p in parameters]).sum()}

    def _squares(self, name: str, moved: Tensor) -> Tensor:
        squares = moved.square()
        if self.importance is not None:
            squares = squares * self.importance[name]
        return squares.sum()
