"""Policies without an adapter, run by their own forward pass."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, override

import torch
from lerobot.utils.constants import ACTION
from torch import Tensor

from craftcli.cache.pooling import TokenMasks
from craftcli.choices import OutputKind, Pooling
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import Batch, Features, LayerStack, Policy, PolicyAdapter, Wanted
from craftcli.policies.paths import describe_lists, is_path
from craftcli.policies.tokens import ACTION_IS_PAD, nothing_padded

SEED = "craft.seed"
"""Batch entry [B]: from what each row draws, in a policy whose forward pass draws at random."""

# Columns of every LeRobot dataset that tell where a row is, and nothing that a policy acts on.
_BOOKKEEPING = frozenset({"index", "episode_index", "frame_index", "task_index", "timestamp"})


class OwnForwardAdapter(PolicyAdapter):
    """Serves every policy that has no adapter of its own; its stacks go by their paths."""

    policy_types: ClassVar[tuple[str, ...]] = ()
    stack_names: ClassVar[tuple[str, ...]] = ()
    default_stack: ClassVar[str] = ""
    default_layers: ClassVar[tuple[int, ...]] = (-1,)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"text", "action"})
    output_kind: ClassVar[OutputKind | None] = None

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
            why=f"craft knows nothing of this family; its lists of layers are "
            f"{describe_lists(policy)}.",
            fix="give --stack the path of one of these; or write an adapter, as "
            "examples/own_policy does.",
            exit_code=EXIT_USAGE,
        )

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        # Which of several a layer computes in is unknown: the widest loses nothing.
        found = {p.dtype for p in policy.parameters() if p.is_floating_point()}
        widest: torch.dtype = functools.reduce(torch.promote_types, found)
        return widest

    @override
    def input_keys(self, policy: Policy, batch: Batch, wanted: Wanted) -> tuple[str, ...]:
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
        completed = {key: batch[key] for key in self.input_keys(policy, batch, Wanted())}
        if own_actions:
            actions = _own_actions(policy, completed, seeds)
            completed |= {ACTION: actions, ACTION_IS_PAD: nothing_padded(actions)}
        first = next(each_row(completed))
        if _draws(lambda: _run(policy, first), seeds[0]):
            device = next(iter(completed.values())).device
            completed[SEED] = torch.tensor(seeds, dtype=torch.int64, device=device)
        return completed

    @override
    def features(self, policy: Policy, batch: Batch, wanted: Wanted) -> Features:
        inputs = {key: batch[key] for key in self.input_keys(policy, batch, wanted)}
        seed = inputs.pop(SEED, None)
        with _drawing_from(None if seed is None else int(seed[0])):
            _run(policy, inputs)
        nothing = torch.zeros(0, 0, dtype=torch.bool)
        return Features(
            hidden={}, masks=TokenMasks(image=nothing, text=nothing, action=nothing), output=None
        )


def each_row(batch: Batch) -> Iterator[Batch]:
    """A batch for every row."""
    rows = len(next(value for value in batch.values() if isinstance(value, Tensor) and value.dim()))
    for row in range(rows):
        yield {
            key: value[row : row + 1] if isinstance(value, Tensor) and value.dim() else value
            for key, value in batch.items()
        }


def repeated(batch: Batch, rows: int) -> Batch:
    """The first row so many times."""
    return {
        key: torch.cat([value[:1]] * rows) if isinstance(value, Tensor) and value.dim() else value
        for key, value in batch.items()
    }


def _run(policy: Policy, batch: Batch) -> Any:
    """The policy's own forward pass."""
    try:
        return policy(dict(batch))
    except CraftError:
        raise
    except Exception as error:  # anything may be wrong in code that nobody here knows
        raise _cannot_run(policy, error) from error


def _cannot_run(policy: Policy, error: Exception) -> CraftError:
    lines = str(error).strip().splitlines()
    return CraftError(
        f"The {policy.config.type} policy cannot be run on anchors.",
        why=f"its own forward pass, on the tensors of a batch and in evaluation mode, ended with "
        f"{type(error).__name__}: {lines[0] if lines else 'no message'}",
        fix="write an adapter that runs it, as examples/own_policy does.",
    )


@torch.no_grad()
def _own_actions(policy: Policy, batch: Batch, seeds: Sequence[int]) -> Tensor:
    """The actions that the policy itself would take, in place of those of the data."""
    parts = []
    for row, seed in zip(each_row(batch), seeds, strict=True):
        given = {key: value for key, value in row.items() if key not in (ACTION, ACTION_IS_PAD)}
        try:
            policy.reset()
            with _drawing_from(seed):
                parts.append(policy.predict_action_chunk(given))
        except Exception as error:  # as in `_run`
            raise _no_actions(policy, f"{type(error).__name__}: {error}") from error
    actions = torch.cat(parts)
    if ACTION in batch and actions.shape != batch[ACTION].shape:
        why = f"it predicts {tuple(actions.shape)} where the data has {tuple(batch[ACTION].shape)}"
        raise _no_actions(policy, why)
    return actions


def _no_actions(policy: Policy, why: str) -> CraftError:
    return CraftError(
        f"The {policy.config.type} policy's own actions are not to be had.",
        why=f"predict_action_chunk gives none that could stand for the data's: {why}.",
        fix="use --actions data, or write an adapter, as examples/own_policy does.",
    )


@contextmanager
def _drawing_from(seed: int | None) -> Iterator[None]:
    """Random numbers from a seed inside, and the old ones after; None changes nothing."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def _draws(run: Callable[[], object], seed: int) -> bool:
    """Whether this draws random numbers."""
    with _drawing_from(seed):
        before = _random_state()
        run()
        return not torch.equal(before, _random_state())


def _random_state() -> Tensor:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return torch.cat(states)
