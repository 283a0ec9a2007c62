"""What is stored of a teacher's outputs: the tokens it gave, and what it held likely or did."""

from collections.abc import Collection

import torch
from torch import Tensor

from craftcli.cache.format import (
    LABELS,
    OUTPUT_MASK,
    PREDICTION,
    TOP_LOGPROBS,
    TOP_TOKENS,
)
from craftcli.choices import Kind, OutputKind
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import Batch, Output, PolicyAdapter


def default_kinds(adapter: PolicyAdapter) -> tuple[Kind, ...]:
    """What keeps behaviour: hidden states, and the outputs wherever they can be had.

    Hidden states alone left the action head free to drift, and lost a skill in simulation
    (examples/metaworld_forgetting).
    """
    return (Kind.HIDDEN,) if adapter.output_kind is None else (Kind.HIDDEN, Kind.ACTION)


def check_kinds(adapter: PolicyAdapter, kinds: Collection[Kind]) -> None:
    """Refuse a kind that this policy family cannot give."""
    if adapter.output_kind is None and set(kinds) != {Kind.HIDDEN}:
        raise CraftError(
            f"The kind {' and '.join(kind for kind in kinds if kind is not Kind.HIDDEN)} does not "
            "work for this policy.",
            why="it has no adapter, and what it predicts cannot be had with gradients without one.",
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


def stored_outputs(
    adapter: PolicyAdapter, batch: Batch, output: Output, kinds: Collection[Kind], *, top_k: int
) -> dict[str, Tensor]:
    """The arrays of the kinds asked for, a row each."""
    stored = {}
    if Kind.TOKEN_CE in kinds:
        stored[LABELS] = adapter.labels(batch)
    if Kind.ACTION in kinds:
        stored[OUTPUT_MASK] = output.mask
        if adapter.output_kind is OutputKind.VECTORS:
            stored[PREDICTION] = output.values.float()
        else:
            logprobs = torch.log_softmax(output.values.float(), dim=-1)
            kept = logprobs.topk(min(top_k, logprobs.shape[-1]), dim=-1)
            stored[TOP_LOGPROBS] = kept.values
            stored[TOP_TOKENS] = kept.indices.to(torch.int32)
    return stored
