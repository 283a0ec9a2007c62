"""What craft asks of a policy family: its stacks of layers, its tokens, its hidden states."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from craftcli.cache.pooling import TokenMasks
from craftcli.choices import Pooling
from craftcli.errors import EXIT_USAGE, CraftError

type Policy = Any
"""A LeRobot policy; LeRobot ships no types, and `nn.Module` would hide every attribute."""

type Batch = dict[str, Any]
"""What a LeRobot preprocessor returns: tensors and texts by feature name."""


@dataclass(frozen=True, kw_only=True)
class LayerStack:
    """A run of layers whose outputs can be tapped, and the norm that follows the last of them."""

    layers: nn.ModuleList
    norm: nn.Module


@dataclass(frozen=True, kw_only=True)
class Features:
    """Hidden states [batch, tokens, dim] of the layers asked for, and what each token is."""

    hidden: Mapping[int, Tensor]
    masks: TokenMasks


class PolicyAdapter(ABC):
    """One policy family. Methods take the policy, so that an adapter holds no state."""

    policy_types: ClassVar[tuple[str, ...]]
    """LeRobot's names of the policies this adapter serves."""
    default_stack: ClassVar[str]
    """The stack that leads to the action."""
    default_layers: ClassVar[tuple[int, ...]]
    default_pooling: ClassVar[Pooling]
    """The pooling that was measured to hold behaviour."""
    token_kinds: ClassVar[frozenset[str]]
    """Which of image, text and action tokens the stacks carry."""

    @abstractmethod
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        """The stacks of this policy by name."""

    @abstractmethod
    def features(
        self,
        policy: Policy,
        batch: Batch,
        *,
        stack: str,
        layers: tuple[int, ...],
        with_actions: bool,
    ) -> Features:
        """Run the policy's own forward as far as the last layer asked for."""

    @abstractmethod
    def input_keys(self, policy: Policy, batch: Batch, *, with_actions: bool) -> tuple[str, ...]:
        """The entries of a processed batch that `features` reads."""

    @abstractmethod
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        """The precision in which the layers compute; norms and the vision tower may differ."""

    def image_keys(self, policy: Policy, batch: Batch) -> tuple[str, ...]:
        """The entries of a processed batch that are images of the policy's cameras."""
        return tuple(sorted(key for key in policy.config.image_features if key in batch))

    def saved_name(self, name: str) -> str:
        """Under which name a tensor may be saved when it is not under its own."""
        return name

    @abstractmethod
    def processor_overrides(self, config: Any) -> dict[str, dict[str, Any]]:
        """Settings of the saved preprocessor that LeRobot forgets to save."""

    def stack(self, policy: Policy, name: str) -> LayerStack:
        """The stack of that name, or an error that lists the ones there are."""
        stacks = self.stacks(policy)
        if name not in stacks:
            raise CraftError(
                f"The policy has no stack {name!r}.",
                why=f"{self.policy_types[0]} has {', '.join(sorted(stacks))}.",
                fix=f"use --stack {self.default_stack}.",
                exit_code=EXIT_USAGE,
            )
        return stacks[name]
