"""What a build keeps of its teacher: the settings, with the policy family's defaults filled in."""

from collections.abc import Collection
from dataclasses import dataclass

from craftcli.cache.layers import parse_layers, resolve_layers
from craftcli.cache.requests import feature_request
from craftcli.choices import ActionSource, Kind, Layout, OutputKind, Pooling, StoreDtype
from craftcli.config.cache import CacheConfig
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import FeatureRequest, PolicyAdapter
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.pooling import required_tokens


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a build keeps: which layers of which stack, which tokens, in which precision."""

    kinds: tuple[Kind, ...]
    stack: str
    layers: tuple[int, ...]
    """Counted from 0; empty when no hidden states are kept."""
    layer_count: int
    pooling: Pooling
    dtype: str
    actions: ActionSource
    top_k: int
    seed: int
    """Seed of what the policy draws at random."""
    layout: Layout | None = None
    """Order of the axes of the states, for a stack named by its path; None until it is found."""

    @property
    def request(self) -> FeatureRequest:
        """What the teacher's forward pass must return."""
        return feature_request(self, self.kinds)


def resolve_recipe(config: CacheConfig, teacher: Checkpoint) -> Recipe:
    """Fill in the policy family's defaults and check the settings against the policy."""
    adapter = teacher.adapter
    kinds = config.kinds or default_kinds(adapter)
    _require_kinds(adapter, kinds)
    stack = config.stack or adapter.default_stack
    count = len(adapter.stack(teacher.policy, stack))
    layers = adapter.default_layers if config.layers is None else parse_layers(config.layers)
    pooling = config.pooling or adapter.pooling_of(stack)
    _check_tokens(teacher, stack, pooling)
    dtype = config.dtype.value
    if config.dtype is StoreDtype.AUTO:
        dtype = str(adapter.compute_dtype(teacher.policy)).removeprefix("torch.")
    return Recipe(
        kinds=kinds,
        stack=stack,
        layers=resolve_layers(layers, count) if Kind.HIDDEN in kinds else (),
        layer_count=count,
        pooling=pooling,
        dtype=dtype,
        actions=config.actions,
        top_k=config.top_k,
        seed=config.seed,
        layout=config.layout,
    )


def default_kinds(adapter: PolicyAdapter) -> tuple[Kind, ...]:
    """The kinds that keep behaviour: hidden states, and the outputs where the family has them.

    Hidden states alone left the action head free to drift, and lost a skill in simulation
    (examples/metaworld_forgetting).
    """
    return (Kind.HIDDEN,) if adapter.output_kind is None else (Kind.HIDDEN, Kind.ACTION)


def _require_kinds(adapter: PolicyAdapter, kinds: Collection[Kind]) -> None:
    """Refuse a kind that this policy family does not have."""
    if adapter.output_kind is None and set(kinds) != {Kind.HIDDEN}:
        raise CraftError(
            f"The kind {' and '.join(kind for kind in kinds if kind is not Kind.HIDDEN)} does not "
            "work for this policy.",
            why="it has no adapter, and without one its predictions carry no gradients.",
            fix="use --kind hidden with --stack, or write an adapter, as examples/own_policy does.",
            exit_code=EXIT_USAGE,
        )
    if Kind.TOKEN_CE in kinds and adapter.output_kind is not OutputKind.TOKENS:
        raise CraftError(
            "The kind token_ce does not work for this policy.",
            why="it predicts actions, not tokens.",
            fix="use --kind action.",
            exit_code=EXIT_USAGE,
        )


def _check_tokens(teacher: Checkpoint, stack: str, pooling: Pooling) -> None:
    """Refuse a pooling of tokens that the stack does not carry."""
    adapter = teacher.adapter
    carried, prefix = adapter.tokens_of(stack), frozenset({"image", "text"})
    missing = required_tokens(pooling) - carried
    if not required_tokens(pooling) and carried.isdisjoint(prefix):
        # Poolings that name no kind of token use the image and text tokens.
        missing = prefix
    if missing:
        raise CraftError(
            f"The pooling {pooling} does not work for this policy.",
            why=f"the stack {stack} of {teacher.policy_type} has no "
            f"{' or '.join(sorted(missing))} tokens.",
            fix=f"use --pooling {adapter.pooling_of(stack)}.",
            exit_code=EXIT_USAGE,
        )
