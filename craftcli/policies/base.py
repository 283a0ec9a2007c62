"""What craft asks of a policy family: its stacks of layers, its tokens, its hidden states."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from craftcli.cache.pooling import TokenMasks
from craftcli.choices import Layout, OutputKind, Pooling
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.paths import is_path, layers_at

type Policy = Any
"""A LeRobot policy; LeRobot ships no types, and `nn.Module` would hide every attribute."""

type Batch = dict[str, Any]
"""What a LeRobot preprocessor returns: tensors and texts by feature name."""


NOISE = "craft.noise"
TIME = "craft.time"
"""Batch entries that hold what a policy would otherwise draw at random in its forward pass."""


@dataclass(frozen=True)
class TapPoint:
    """Where a layer's output can be read: as what a module takes, or as what it returns."""

    module: nn.Module
    before: bool = False
    """Read the module's first input rather than its output."""


@dataclass(frozen=True)
class LayerStack:
    """A run of layers whose outputs can be tapped."""

    points: tuple[TapPoint, ...]

    @classmethod
    def of_norms(cls, layers: Iterable[Any], norm: nn.Module) -> Self:
        """Layers of a language model, each read before the norm that follows it.

        Joint-attention policies (pi0, smolvla) never call their layers as modules, but all of them
        call these norms, and a norm's input is the residual stream itself.
        """
        norms = [*(layer.input_layernorm for layer in layers), norm]
        return cls(tuple(TapPoint(module, before=True) for module in norms[1:]))

    @classmethod
    def of_modules(cls, layers: Iterable[nn.Module]) -> Self:
        """Layers that are called as modules, each read as what it returns."""
        return cls(tuple(TapPoint(layer) for layer in layers))

    def __len__(self) -> int:
        return len(self.points)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked of one forward pass."""

    stack: str = ""
    layers: tuple[int, ...] = ()
    """Counted from 0; none when only the output is wanted."""
    with_actions: bool = False
    """Run over the action tokens too, where the policy has such."""
    output: bool = False
    """Run to the end, for what the policy predicts."""
    layout: Layout | None = None
    """How the states of a stack lie that was named by its path."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Output:
    """What a policy predicts, position by position."""

    values: Tensor
    """[B, S, D]: logits over a vocabulary, or actions, velocities or noise."""
    mask: Tensor
    """[B, S] bool: which positions count."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """Hidden states [batch, tokens, dim] of the layers asked for, and what each token is."""

    hidden: Mapping[int, Tensor]
    masks: TokenMasks
    output: Output | None = None


class PolicyAdapter(ABC):
    """One policy family. Methods take the policy, so that an adapter holds no state."""

    policy_types: ClassVar[tuple[str, ...]]
    """LeRobot's names of the policies this adapter serves."""
    stack_names: ClassVar[tuple[str, ...]]
    """What `stacks` can give."""
    default_stack: ClassVar[str]
    """The stack that leads to the action."""
    default_layers: ClassVar[tuple[int, ...]]
    default_pooling: ClassVar[Pooling]
    """The pooling that was measured to hold behaviour."""
    token_kinds: ClassVar[frozenset[str]]
    """Which of image, text and action tokens the stacks carry."""
    output_kind: ClassVar[OutputKind | None]
    """What `Output.values` are; None when `features` gives no output."""
    loads_strictly: ClassVar[bool] = False
    """LeRobot refuses by itself to load weights of this family that are not complete."""

    @abstractmethod
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        """The stacks of this policy by name."""

    @abstractmethod
    def features(self, policy: Policy, batch: Batch, wanted: Wanted) -> Features:
        """Run the policy's own forward as far as is needed for what is wanted.

        The same batch gives the same result every time: what the policy draws at random in
        training comes from the batch (`anchor_inputs`) or is left out.
        """

    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        """Complete a processed batch for `features`, a seed to each of its rows.

        Adds the noise and times that the policy would draw, and with `own_actions` replaces the
        actions of the data by those that the policy itself would take, so that no label is used.
        """
        return batch

    def tokens_of(self, stack: str) -> frozenset[str]:
        """Which of image, text and action tokens this stack carries."""
        return self.token_kinds

    def pooling_of(self, stack: str) -> Pooling:
        """The pooling of this stack when the user asks for none."""
        return self.default_pooling

    def labels(self, batch: Batch) -> Tensor:
        """[B, S] token ids that the positions of the output are to predict, -100 for none."""
        raise NotImplementedError(f"{self.policy_types[0]} predicts no tokens")

    @abstractmethod
    def input_keys(self, policy: Policy, batch: Batch, wanted: Wanted) -> tuple[str, ...]:
        """The entries of a batch from `anchor_inputs` that `features` reads for what is wanted."""

    @abstractmethod
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        """The precision in which the layers compute; norms and the vision tower may differ."""

    def action_bound(self, policy: Policy) -> float | None:
        """Where normalised actions are cut off when the policy acts; None if nowhere."""
        return None

    def image_keys(self, policy: Policy, batch: Batch) -> tuple[str, ...]:
        """The entries of a processed batch that are images of the policy's cameras."""
        return tuple(sorted(key for key in policy.config.image_features if key in batch))

    def saved_name(self, name: str) -> str:
        """Under which name a tensor may be saved when it is not under its own."""
        return name

    def processor_overrides(self, config: Any) -> dict[str, dict[str, Any]]:
        """Settings of the saved preprocessor that LeRobot forgets to save."""
        return {}

    def found_layout(self, policy: Policy, batch: Batch, wanted: Wanted) -> Layout | None:
        """How the states of a stack lie, found by running it, when the adapter cannot know."""
        return None

    def stack(self, policy: Policy, name: str) -> LayerStack:
        """The stack of that name or path, or an error that lists the ones there are."""
        if is_path(name):
            return LayerStack.of_modules(layers_at(policy, name))
        stacks = self.stacks(policy)
        if name not in stacks:
            raise CraftError(
                f"The policy has no stack {name!r}.",
                why=f"{policy.config.type} has {', '.join(sorted(stacks))}.",
                fix=f"use --stack {self.default_stack}, or the path of any list of layers, as in "
                "--stack model.encoder.layers (craft info --policies --policy POLICY lists them).",
                exit_code=EXIT_USAGE,
            )
        return stacks[name]
