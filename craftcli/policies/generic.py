"""Any list of layers of any policy: by its dotted path, around a forward pass that knows nothing.

A family that has an adapter is run as that adapter runs it. A policy without one runs its own
forward pass; what that draws at random, it draws from a seed of the row, one row at a time.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, override

import torch
from torch import Tensor

from craftcli.cache.pooling import TokenMasks
from craftcli.choices import Layout, OutputKind, Pooling
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import Batch, Features, LayerStack, Policy, PolicyAdapter, Wanted
from craftcli.policies.layouts import as_tokens, layout_of
from craftcli.policies.memory import may_stop
from craftcli.policies.own_forward import SEED, each_row, repeated
from craftcli.policies.taps import tap


class PathAdapter(PolicyAdapter):
    """Taps a list of layers that is named by its path while another adapter runs the policy.

    Nothing is known of the tokens: all positions count, as actions for poolings of those, and as
    text for the others.
    """

    policy_types: ClassVar[tuple[str, ...]] = ()
    stack_names: ClassVar[tuple[str, ...]] = ()
    default_stack: ClassVar[str] = ""
    default_layers: ClassVar[tuple[int, ...]] = (-1,)
    # Every position is kept: what a mean leaves out is free to drift.
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"text", "action"})
    output_kind: ClassVar[OutputKind | None]

    def __init__(self, runner: PolicyAdapter) -> None:
        self._runner = runner
        self._whole = Wanted(stack=runner.default_stack, with_actions=True, output=True)
        # The families' own never changes, and is of their class; here it is the runner's.
        self.output_kind = runner.output_kind  # type: ignore[misc]

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        return self._runner.stacks(policy)

    @override
    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        return self._runner.anchor_inputs(policy, batch, seeds=seeds, own_actions=own_actions)

    @override
    def labels(self, batch: Batch) -> Tensor:
        return self._runner.labels(batch)

    @override
    def input_keys(self, policy: Policy, batch: Batch, wanted: Wanted) -> tuple[str, ...]:
        return self._runner.input_keys(policy, batch, self._whole)

    @override
    def image_keys(self, policy: Policy, batch: Batch) -> tuple[str, ...]:
        return self._runner.image_keys(policy, batch)

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        return self._runner.compute_dtype(policy)

    @override
    def action_bound(self, policy: Policy) -> float | None:
        return self._runner.action_bound(policy)

    @override
    def processor_overrides(self, config: Any) -> dict[str, dict[str, Any]]:
        return self._runner.processor_overrides(config)

    @override
    def found_layout(self, policy: Policy, batch: Batch, wanted: Wanted) -> Layout:
        layer = wanted.layers[0]
        shapes = {
            rows: self._tapped(policy, repeated(batch, rows), wanted)[0][layer].shape
            for rows in (2, 3)
        }
        return layout_of(shapes, stack=wanted.stack)

    @override
    def features(self, policy: Policy, batch: Batch, wanted: Wanted) -> Features:
        parts = each_row(batch) if SEED in batch else [batch]
        tapped = [self._tapped(policy, part, wanted) for part in parts]
        hidden = {
            layer: torch.cat([as_tokens(states[layer], wanted.layout) for states, _ in tapped])
            for layer in wanted.layers
        }
        _require_one_shape(hidden, wanted.stack)
        output = tapped[0][1].output if wanted.output else None
        return Features(hidden=hidden, masks=_masks(hidden, wanted), output=output)

    def _tapped(
        self, policy: Policy, batch: Batch, wanted: Wanted
    ) -> tuple[dict[int, Tensor], Features]:
        found = _NOTHING
        stack = self.stack(policy, wanted.stack)
        stop = may_stop(policy, wanted)
        with tap(stack, wanted.layers, stop=stop) as seen:
            found = self._runner.features(policy, batch, self._whole)
        missing = [layer for layer in wanted.layers if layer not in seen]
        if missing:
            raise CraftError(
                f"The layers {', '.join(map(str, missing))} of {wanted.stack} cannot be read.",
                why="the policy's forward pass never calls them as modules.",
                fix="choose another list of layers, or one that the policy's adapter names.",
                exit_code=EXIT_USAGE,
            )
        return seen, found


def _masks(hidden: dict[int, Tensor], wanted: Wanted) -> TokenMasks:
    shape = next(iter(hidden.values())).shape[:2] if hidden else (0, 0)
    device = next(iter(hidden.values())).device if hidden else None
    every = torch.ones(shape, dtype=torch.bool, device=device)
    action = every if wanted.with_actions else ~every
    return TokenMasks(image=~every, text=~action, action=action, action_span=(0, shape[1]))


_NOTHING = Features(hidden={}, masks=_masks({}, Wanted()))


def _require_one_shape(hidden: dict[int, Tensor], stack: str) -> None:
    shapes = {layer: tuple(states.shape[1:]) for layer, states in hidden.items()}
    if len(set(shapes.values())) > 1:
        told = ", ".join(f"{layer} is {shape}" for layer, shape in shapes.items())
        raise CraftError(
            f"The layers of {stack} cannot be stored together.",
            why=f"their states [tokens, dim] differ: {told}.",
            fix="choose layers of one shape with --layers.",
            exit_code=EXIT_USAGE,
        )
