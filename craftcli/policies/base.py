"""How to write a new policy family: subclass `PolicyAdapter`, one file in `families/`.

An adapter answers three questions about a policy: which layers it has (`stacks`), what a batch must
contain (`anchor_inputs`, `input_keys`), and what its forward pass computes (`features`). A family
must write the abstract methods and set the class variables without a value, from `policy_types` to
`output_kind`; the registry refuses an adapter that lacks one. The rest has defaults that suit most
families.
Name it in `ADAPTERS` of `families/registry.py`, or by an entry point in a package of your own, as
`examples/own_policy` does in 40 lines.

Two rules hold for `features`. The same batch gives the same result every time, whichever rows are
in it: teacher and student are compared by it. And gradients flow through everything it returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from craftcli.choices import Layout, OutputKind, Pooling
from craftcli.config.retention import DEFAULT_EPSILON, SAMPLES_PER_ANCHOR
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.layer_paths import is_path, layers_at
from craftcli.policies.pooling import TokenMasks

type Policy = Any
"""A LeRobot policy; LeRobot ships no types, and `nn.Module` would hide every attribute."""

type Batch = dict[str, Any]
"""The result of a LeRobot preprocessor: tensors and texts by feature name."""

NOISE = "craft.noise"
"""Batch entry with the noise that the policy would otherwise draw in its forward pass."""
TIME = "craft.time"
"""Batch entry with the times (or diffusion steps) that the policy would otherwise draw."""

VISION_LANGUAGE_PARTS = ("vision_tower", "multi_modal_projector", "language_model", "lm_head")
"""Module names that most vision-language models of Hugging Face share."""


@dataclass(frozen=True)
class TapPoint:
    """A place where a layer's output can be read: the output of a module, or its first input."""

    module: nn.Module
    before: bool = False
    """Read the module's first input instead of its output."""


@dataclass(frozen=True)
class LayerStack:
    """Consecutive layers, with the places where their outputs can be read."""

    points: tuple[TapPoint, ...]

    @classmethod
    def of_modules(cls, layers: Iterable[nn.Module]) -> Self:
        """Layers that the policy calls as modules: each is read at its output."""
        return cls(tuple(TapPoint(layer) for layer in layers))

    @classmethod
    def of_norms(cls, layers: Iterable[Any], norm: nn.Module) -> Self:
        """Layers of a language model: each is read at the input of the norm that follows it.

        Joint-attention policies (pi0, smolvla) never call their layers as modules. All of them call
        these norms, and the input of a norm is the residual stream itself.
        """
        norms = [*(layer.input_layernorm for layer in layers), norm]
        return cls(tuple(TapPoint(module, before=True) for module in norms[1:]))

    def __len__(self) -> int:
        return len(self.points)


@dataclass(frozen=True, kw_only=True)
class FeatureRequest:
    """What one forward pass must return."""

    stack: str = ""
    layers: tuple[int, ...] = ()
    """Indices from 0; empty when only the output is needed."""
    with_actions: bool = False
    """Run over the action tokens too, if the policy has any."""
    output: bool = False
    """Run to the end and return the policy's prediction."""
    layout: Layout | None = None
    """Order of the axes in the states of a stack that is named by its path."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyOutput:
    """What a policy predicts at each position."""

    values: Tensor
    """[B, S, D]: logits over a vocabulary, or actions, velocities or noise."""
    mask: Tensor
    """[B, S] bool: the positions that count."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """The result of one forward pass: hidden states, the kind of each token, and the output."""

    hidden: Mapping[int, Tensor]
    """[batch, tokens, dim] for each requested layer."""
    masks: TokenMasks
    output: PolicyOutput | None = None


class PolicyAdapter(ABC):
    """One policy family. An adapter has no state: every method takes the policy."""

    policy_types: ClassVar[tuple[str, ...]]
    """LeRobot's names of the policies that this adapter serves."""
    stack_names: ClassVar[tuple[str, ...]]
    """The names that `stacks` can return."""
    default_stack: ClassVar[str]
    """The stack that leads to the action."""
    default_layers: ClassVar[tuple[int, ...]]
    default_pooling: ClassVar[Pooling]
    """The pooling that held behaviour best when it was measured."""
    token_kinds: ClassVar[frozenset[str]]
    """Which of image, text and action tokens the stacks carry."""
    output_kind: ClassVar[OutputKind | None]
    """What `PolicyOutput.values` are; None when `features` returns no output."""
    loads_strictly: ClassVar[bool] = False
    """True if LeRobot itself refuses to load incomplete weights of this family."""
    pads_vectors: ClassVar[bool] = False
    """Whether the policy pads states and actions of any size up to its configured maximum."""
    samples_per_anchor: ClassVar[int] = SAMPLES_PER_ANCHOR
    """By default a step has one anchor for so many samples of the task."""
    draws_per_frame: ClassVar[int] = 1
    """How often a run that makes its own anchors stores each old frame, with another noise."""
    weighs_rows: ClassVar[bool] = False
    """Whether `row_weights` weighs anchors: L_ret then is no mere share of the variance."""
    statistics_expectation: ClassVar[str | None] = None
    """How well states drawn from statistics hold this family, if not as well as the others."""
    reported_parts: ClassVar[tuple[str, ...]] = ()
    """Modules that reports list by name; other parameters go by the first part of their name."""

    def unset(self) -> list[str]:
        """The class variables that an adapter must set and this one does not."""
        needed = [
            name for name in PolicyAdapter.__annotations__ if not hasattr(PolicyAdapter, name)
        ]
        return [name for name in needed if not hasattr(self, name)]

    @abstractmethod
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        """The stacks of this policy by name."""

    @abstractmethod
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        """The batch entries that `features` reads for this request: a cache stores these.

        `batch` is a result of `anchor_inputs`.
        """

    @abstractmethod
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        """Run the policy's own forward pass as far as the request needs.

        Values that the policy would draw at random come from the batch (see `anchor_inputs`), or
        the random part is left out.
        """

    @abstractmethod
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        """The precision in which the layers compute; norms and the vision tower may differ."""

    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        """Complete a preprocessed batch for `features`, with one seed for each row.

        Adds the noise and times that the policy would draw. With `own_actions`, replaces the
        dataset's actions by those that the policy itself predicts, so that no label is used.
        """
        return batch

    def row_weights(self, policy: Policy, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """[B]: how much an error on each anchor counts in L_ret; None if all count alike.

        `inputs` are those that `features` reads. Weights are 1 on average over what the policy
        draws, so that L_ret remains a mean.
        """
        return None

    def epsilon_of(self, stack: str) -> float:
        """The default budget while this stack is held, as a share of the teacher's variance."""
        return DEFAULT_EPSILON

    def labels(self, batch: Batch) -> Tensor:
        """[B, S]: the token id that each output position should predict, -100 for none."""
        raise NotImplementedError(f"{self.policy_types[0]} predicts no tokens")

    def tokens_of(self, stack: str) -> frozenset[str]:
        """Which of image, text and action tokens this stack carries."""
        return self.token_kinds

    def pooling_of(self, stack: str) -> Pooling:
        """The default pooling of this stack."""
        return self.default_pooling

    def find_layout(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Layout | None:
        """The order of the axes in a stack's states, found by running it; None if it is known."""
        return None

    def image_keys(self, policy: Policy, batch: Batch) -> tuple[str, ...]:
        """The entries of a preprocessed batch that are images of the policy's cameras."""
        return tuple(sorted(key for key in policy.config.image_features if key in batch))

    def images(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        """The images of a preprocessed batch by `image_keys`, each tensor with one row per row."""
        return {key: batch[key] for key in self.image_keys(policy, batch)}

    def action_bound(self, policy: Policy) -> float | None:
        """The limit to which the policy clips normalised actions; None if it does not clip."""
        return None

    def forget_old_weights(self, policy: Policy) -> None:
        """Drop what the policy keeps of its weights from when it last acted: they have changed."""
        return

    def saved_name(self, name: str) -> str:
        """Another name under which a checkpoint may hold the tensor `name`."""
        return name

    def processor_overrides(self, config: Any) -> dict[str, dict[str, Any]]:
        """Settings of the preprocessor that LeRobot does not save with it, by step."""
        return {}

    def enable_gradient_checkpointing(self, policy: Policy) -> None:
        """Recompute layers in the backward pass: less memory, more time."""
        enable = getattr(getattr(policy, "model", None), "gradient_checkpointing_enable", None)
        if enable is None:
            raise CraftError(
                "This policy has no gradient checkpointing.",
                why=f"LeRobot's {policy.config.type} does not implement it.",
                fix="leave --gradient-checkpointing out; --amp bf16 and a smaller --batch-size "
                "with --grad-accum save memory too.",
                exit_code=EXIT_USAGE,
            )
        enable()

    def language_model(self, policy: Policy) -> nn.Module | None:
        """The vision-language model that an action expert reads; None if there is no expert."""
        return None

    def shard_units(self, policy: Policy) -> list[nn.Module]:
        """The modules that FSDP2 gathers one at a time; everything else is gathered for a step.

        Each must be called as a module wherever its parameters are used. By default these are the
        layers that are read at their output: they are called.
        """
        points = [point for stack in self.stacks(policy).values() for point in stack.points]
        return [point.module for point in points if not point.before]

    def part_of(self, parameter: str) -> str:
        """The part of the policy under which reports count this parameter."""
        named = (part for part in self.reported_parts if f".{part}." in f".{parameter}")
        return next(named, parameter.split(".")[0])

    def stack(self, policy: Policy, name: str) -> LayerStack:
        """The stack with this name or path, or an error that lists the stacks that exist."""
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
