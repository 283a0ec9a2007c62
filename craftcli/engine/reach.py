"""Which parameters the retention loss holds, and which it leaves free to drift, by autograd."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from craftcli.choices import Mode
from craftcli.engine.retention import Retention
from craftcli.engine.terms import evaluation_mode
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.policies.base import Batch, LayerStack, Policy, PolicyAdapter
from craftcli.policies.taps import tap

# The parts of a policy that people speak of, where its names have them.
_PARTS = ("vision_tower", "multi_modal_projector", "language_model", "lm_head")


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Names of trainable parameters, by what acts on them."""

    trainable: frozenset[str]
    retained: frozenset[str]
    """The retention gradient reaches them."""
    downstream: frozenset[str]
    """The task gradient reaches them on a way that does not pass the deepest retained layer."""
    free: frozenset[str]
    """Those among them that no output and no weight's distance holds either."""
    idle: tuple[Mode, ...] = ()
    """Modes whose own gradient reaches none: what they hold is frozen."""


def find_reach(
    policy: Policy, adapter: PolicyAdapter, retention: Retention, task_batch: Batch
) -> Reach:
    """Run one task batch and one anchor batch backwards; gradients are left empty."""
    trainable = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    downstream: frozenset[str] = frozenset()
    with _nothing_at_zero(trainable.values()):
        probes = {
            mode: _touched(term.probe(mode), trainable)
            for term in retention.terms
            for mode in term.modes
        }
        if retention.anchors is not None and Mode.HIDDEN in retention.modes:
            manifest = retention.anchors.manifest
            stack = adapter.stack(policy, manifest.stack)
            downstream = _behind(stack, max(manifest.layers), policy, trainable, task_batch)
    # A weight tied to one before the layer is reached by the hidden states, and yet free behind it.
    held = [names for mode, names in probes.items() if mode is not Mode.HIDDEN]
    return Reach(
        trainable=frozenset(trainable),
        retained=frozenset().union(*probes.values()),
        downstream=downstream,
        free=downstream.difference(*held),
        idle=tuple(mode for mode, names in probes.items() if not names),
    )


@contextmanager
def _nothing_at_zero(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """For a while, random values in what is all zeros.

    The second matrix of a new adapter is, and lets no gradient pass to the first. After one step
    of training it will.
    """
    zeros = [parameter for parameter in parameters if not parameter.count_nonzero()]
    generator = torch.Generator().manual_seed(0)
    for parameter in zeros:
        values = torch.randn(parameter.shape, generator=generator) * 0.01
        parameter.data.copy_(values)
    try:
        yield
    finally:
        for parameter in zeros:
            parameter.data.zero_()


def _behind(
    stack: LayerStack,
    layer: int,
    policy: Policy,
    trainable: dict[str, nn.Parameter],
    task_batch: Batch,
) -> frozenset[str]:
    """Whatever still gets a gradient of the task when none passes the layer."""
    with evaluation_mode(policy), tap(stack, (layer,), stop=False) as seen:
        loss, _ = policy(task_batch)
    if seen[layer].requires_grad:
        seen[layer].register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    return _touched(loss, trainable)


def require_reach(reach: Reach) -> None:
    """Refuse a run whose retention loss could change nothing."""
    if not reach.retained:
        raise CraftError(
            "Retention would do nothing.",
            why=f"its gradient reaches none of the {len(reach.trainable)} trainable tensors.",
            fix="retain a later layer or stack, or train the part of the policy that is retained.",
            exit_code=EXIT_CHECK_FAILED,
        )


def describe_idle(reach: Reach) -> str | None:
    """Which modes change nothing, though others do, and what to do about it."""
    if not reach.idle:
        return None
    names = ", ".join(reach.idle)
    return (
        f"{names} reaches none of the trainable tensors and holds nothing: choose another --stack "
        "or later --layers in craft cache build, or leave it out of --mode"
    )


def describe_trainable(policy: nn.Module, reach: Reach) -> str:
    """How much of each part of the policy is trained, and how much of that is held."""
    parts: dict[str, list[int]] = {}
    for name, parameter in policy.named_parameters():
        part = next((p for p in _PARTS if f".{p}." in f".{name}"), name.split(".")[0])
        counts = parts.setdefault(part, [0, 0])
        if name in reach.trainable:
            counts[0] += parameter.numel()
        if name in reach.retained:
            counts[1] += parameter.numel()
    return ", ".join(
        f"{part} {trained / 1e6:.3f}M trained, {held / 1e6:.3f}M held"
        for part, (trained, held) in parts.items()
        if trained
    )


def describe_downstream(reach: Reach, *, frozen: bool) -> str:
    """What lies behind the deepest retained layer, and whether anything holds it."""
    told = reach.downstream if frozen else reach.free
    if not told:
        return "nothing trainable is free to drift behind what is retained"
    short = sorted(_short(name) for name in told)
    names = ", ".join(short[:4]) + (f" and {len(short) - 4} more" if len(short) > 4 else "")
    if frozen:
        return f"frozen behind the deepest retained layer: {names}"
    return f"free to drift behind the deepest retained layer: {names}"


def _short(name: str) -> str:
    """The last two parts of a name, without those that all adapters share."""
    return ".".join(re.sub(r"\.(lora_\w+)\.\w+\.weight$", r".\1", name).split(".")[-2:])


def freeze(policy: nn.Module, names: frozenset[str]) -> None:
    """Stop the training of these parameters."""
    for name, parameter in policy.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def _touched(loss: Tensor, parameters: dict[str, nn.Parameter]) -> frozenset[str]:
    for parameter in parameters.values():
        parameter.grad = None
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    touched = frozenset(
        name for name, p in parameters.items() if p.grad is not None and p.grad.count_nonzero()
    )
    for parameter in parameters.values():
        parameter.grad = None
    return touched
