"""Adapters for any policy: stacks that are named by their dotted path.

`GenericAdapter` serves policies that have no adapter of their own. It runs the policy's own forward
pass. If that draws random numbers, every row draws from its own seed, and rows run one at a time.

`PathAdapter` reads a list of layers by its path while another adapter runs the policy: the family's
own, or the generic one.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, override

import torch
from lerobot.utils.constants import ACTION
from torch import Tensor, nn

from craftcli.choices import Layout, OutputKind, Pooling
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import (
    VISION_LANGUAGE_PARTS,
    Batch,
    FeatureRequest,
    Features,
    LayerStack,
    Policy,
    PolicyAdapter,
)
from craftcli.policies.layer_paths import describe_lists, is_path
from craftcli.policies.layouts import as_tokens, layout_of
from craftcli.policies.pooling import TokenMasks
from craftcli.policies.taps import may_stop, tap
from craftcli.policies.tokens import ACTION_IS_PAD, nothing_padded

SEED = "craft.seed"
"""Batch entry [B]: the seed of each row, for a policy that draws in its forward pass."""

# Columns of every LeRobot dataset that say where a row is; no policy acts on them.
_BOOKKEEPING = frozenset({"index", "episode_index", "frame_index", "task_index", "timestamp"})


class GenericAdapter(PolicyAdapter):
    """Serves every policy without an adapter of its own; its stacks are named by their paths."""

    policy_types: ClassVar[tuple[str, ...]] = ()
    stack_names: ClassVar[tuple[str, ...]] = ()
    default_stack: ClassVar[str] = ""
    default_layers: ClassVar[tuple[int, ...]] = (-1,)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"text", "action"})
    output_kind: ClassVar[OutputKind | None] = None
    reported_parts: ClassVar[tuple[str, ...]] = VISION_LANGUAGE_PARTS

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        return {}

    @override
    def stack(self, policy: Policy, name: str) -> LayerStack:
        if is_path(name):
            return super().stack(policy, name)
        what = f"no stack {name!r}" if name else "no adapter that names a stack"
        raise CraftError(
            f"Policies of type {policy.config.type!r} have {what}.",
            why=f"craft does not know this family; its lists of layers are "
            f"{describe_lists(policy)}.",
            fix="give --stack the path of one of these; or write an adapter, as "
            "examples/own_policy does.",
            exit_code=EXIT_USAGE,
        )

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        # Which dtype a layer computes in is unknown: the widest loses nothing.
        found = {p.dtype for p in policy.parameters() if p.is_floating_point()}
        widest: torch.dtype = functools.reduce(torch.promote_types, found)
        return widest

    @override
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        return tuple(
            sorted(
                key
                for key, value in batch.items()
                if isinstance(value, Tensor) and value.dim() and key not in _BOOKKEEPING
            )
        )

    @override
    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        completed = {key: batch[key] for key in self.input_keys(policy, batch, FeatureRequest())}
        if own_actions:
            actions = _own_actions(policy, completed, seeds)
            completed |= {ACTION: actions, ACTION_IS_PAD: nothing_padded(actions)}
        first = next(_each_row(completed))
        if _draws(lambda: _run(policy, first), seeds[0]):
            device = next(iter(completed.values())).device
            completed[SEED] = torch.tensor(seeds, dtype=torch.int64, device=device)
        return completed

    @override
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        """Run the policy; hidden states are read by the `PathAdapter` around this one."""
        inputs = {key: batch[key] for key in self.input_keys(policy, batch, request)}
        seed = inputs.pop(SEED, None)
        with _seeded(None if seed is None else int(seed[0])):
            _run(policy, inputs)
        return _NO_FEATURES


class PathAdapter(PolicyAdapter):
    """Reads a list of layers by its path while another adapter, the runner, runs the policy.

    The kinds of the tokens are unknown: every position counts, as an action for poolings of action
    tokens, and as text for the others.
    """

    policy_types: ClassVar[tuple[str, ...]] = ()
    stack_names: ClassVar[tuple[str, ...]] = ()
    default_stack: ClassVar[str] = ""
    default_layers: ClassVar[tuple[int, ...]] = (-1,)
    # Every position is kept: whatever a mean leaves out is free to drift.
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"text", "action"})
    output_kind: ClassVar[OutputKind | None]

    def __init__(self, runner: PolicyAdapter) -> None:
        self._runner = runner
        self._full_run = FeatureRequest(stack=runner.default_stack, with_actions=True, output=True)
        # A constant of the class in every family; here it is the runner's.
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
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        return self._runner.input_keys(policy, batch, self._full_run)

    @override
    def image_keys(self, policy: Policy, batch: Batch) -> tuple[str, ...]:
        return self._runner.image_keys(policy, batch)

    @override
    def images(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        return self._runner.images(policy, batch)

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        return self._runner.compute_dtype(policy)

    @override
    def action_bound(self, policy: Policy) -> float | None:
        return self._runner.action_bound(policy)

    @override
    def forget_old_weights(self, policy: Policy) -> None:
        self._runner.forget_old_weights(policy)

    @override
    def processor_overrides(self, config: Any) -> dict[str, dict[str, Any]]:
        return self._runner.processor_overrides(config)

    @override
    def enable_gradient_checkpointing(self, policy: Policy) -> None:
        self._runner.enable_gradient_checkpointing(policy)

    @override
    def shard_units(self, policy: Policy) -> list[nn.Module]:
        return self._runner.shard_units(policy)

    @override
    def part_of(self, parameter: str) -> str:
        return self._runner.part_of(parameter)

    @override
    def find_layout(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Layout:
        layer = request.layers[0]
        shapes = {
            rows: self._run(policy, _repeated(batch, rows), request)[0][layer].shape
            for rows in (2, 3)
        }
        return layout_of(shapes, stack=request.stack)

    @override
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        parts = _each_row(batch) if SEED in batch else [batch]
        runs = [self._run(policy, part, request) for part in parts]
        hidden = {
            layer: torch.cat([as_tokens(states[layer], request.layout) for states, _ in runs])
            for layer in request.layers
        }
        _require_one_shape(hidden, request.stack)
        output = runs[0][1].output if request.output else None
        return Features(hidden=hidden, masks=_masks(hidden, request), output=output)

    def _run(
        self, policy: Policy, batch: Batch, request: FeatureRequest
    ) -> tuple[dict[int, Tensor], Features]:
        """The states of the requested layers as the layers return them, and the runner's result."""
        found = _NO_FEATURES
        stack = self.stack(policy, request.stack)
        with tap(stack, request.layers, stop=may_stop(policy, request)) as seen:
            found = self._runner.features(policy, batch, self._full_run)
        missing = [layer for layer in request.layers if layer not in seen]
        if missing:
            raise CraftError(
                f"The layers {', '.join(map(str, missing))} of {request.stack} cannot be read.",
                why="the policy's forward pass never calls them as modules.",
                fix="choose another list of layers, or one that the policy's adapter names.",
                exit_code=EXIT_USAGE,
            )
        return seen, found


def _masks(hidden: dict[int, Tensor], request: FeatureRequest) -> TokenMasks:
    shape = next(iter(hidden.values())).shape[:2] if hidden else (0, 0)
    device = next(iter(hidden.values())).device if hidden else None
    every = torch.ones(shape, dtype=torch.bool, device=device)
    action = every if request.with_actions else ~every
    return TokenMasks(image=~every, text=~action, action=action, action_span=(0, shape[1]))


_NO_FEATURES = Features(hidden={}, masks=_masks({}, FeatureRequest()))


def _require_one_shape(hidden: dict[int, Tensor], stack: str) -> None:
    shapes = {layer: tuple(states.shape[1:]) for layer, states in hidden.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{layer} is {shape}" for layer, shape in shapes.items())
        raise CraftError(
            f"The layers of {stack} cannot be stored together.",
            why=f"their states [tokens, dim] differ: {listed}.",
            fix="choose layers of one shape with --layers.",
            exit_code=EXIT_USAGE,
        )


def _each_row(batch: Batch) -> Iterator[Batch]:
    """Split a batch into batches of one row."""
    rows = len(next(value for value in batch.values() if isinstance(value, Tensor) and value.dim()))
    for row in range(rows):
        yield {
            key: value[row : row + 1] if isinstance(value, Tensor) and value.dim() else value
            for key, value in batch.items()
        }


def _repeated(batch: Batch, rows: int) -> Batch:
    """A batch of `rows` copies of the first row."""
    return {
        key: torch.cat([value[:1]] * rows) if isinstance(value, Tensor) and value.dim() else value
        for key, value in batch.items()
    }


def _run(policy: Policy, batch: Batch) -> Any:
    """Run the policy's own forward pass."""
    try:
        return policy(dict(batch))
    except CraftError:
        raise
    except Exception as error:  # the code of an unknown policy may raise anything
        lines = str(error).strip().splitlines()
        raise CraftError(
            f"The {policy.config.type} policy cannot be run on anchors.",
            why=f"its own forward pass, on the tensors of a batch and in evaluation mode, ended "
            f"with {type(error).__name__}: {lines[0] if lines else 'no message'}",
            fix="write an adapter that runs it, as examples/own_policy does.",
        ) from error


@torch.no_grad()
def _own_actions(policy: Policy, batch: Batch, seeds: Sequence[int]) -> Tensor:
    """The actions that the policy itself predicts, in the shape of the dataset's actions."""
    parts = []
    for row, seed in zip(_each_row(batch), seeds, strict=True):
        observed = {key: value for key, value in row.items() if key not in (ACTION, ACTION_IS_PAD)}
        try:
            policy.reset()
            with _seeded(seed):
                parts.append(policy.predict_action_chunk(observed))
        except Exception as error:  # as in `_run`
            raise _no_actions(policy, f"{type(error).__name__}: {error}") from error
    actions = torch.cat(parts)
    if ACTION in batch and actions.shape != batch[ACTION].shape:
        why = f"it returns {tuple(actions.shape)}, the dataset has {tuple(batch[ACTION].shape)}"
        raise _no_actions(policy, why)
    return actions


def _no_actions(policy: Policy, why: str) -> CraftError:
    return CraftError(
        f"Cannot use the {policy.config.type} policy's own actions.",
        why=f"predict_action_chunk returns none that can replace the dataset's: {why}.",
        fix="use --actions data, or write an adapter, as examples/own_policy does.",
    )


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's random numbers inside the block and restore them after; None does nothing."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def _draws(run: Callable[[], object], seed: int) -> bool:
    """Whether `run` draws random numbers."""
    with _seeded(seed):
        before = _random_state()
        run()
        return not torch.equal(before, _random_state())


def _random_state() -> Tensor:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return torch.cat(states)
