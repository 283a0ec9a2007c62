"""Which parameters the retention loss holds, and which it leaves free to drift, by autograd."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from craftcli.engine.retention import Retention, evaluation_mode
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.policies.base import Batch, Policy, PolicyAdapter
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


def find_reach(
    policy: Policy, adapter: PolicyAdapter, retention: Retention, task_batch: Batch
) -> Reach:
    """Run one task batch and one anchor batch backwards; gradients are left empty."""
    manifest = retention.anchors.manifest
    stack = adapter.stack(policy, manifest.stack)
    trainable = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    device = next(policy.parameters()).device
    with evaluation_mode(policy):
        # At the teacher's weights the retention loss and its gradient are 0, so that the way back
        # is tried with an arbitrary gradient instead.
        states = retention.student_states(retention.anchors.batch(0, device))
        arbitrary = torch.Generator().manual_seed(0)
        probe = [
            (state * torch.randn(state.shape, generator=arbitrary).to(device)).sum()
            for state in states.values()
        ]
        retained = _touched(torch.stack(probe).sum(), trainable)
        deepest = max(manifest.layers)
        with tap(stack, (deepest,), stop=False) as seen:
            loss, _ = policy(task_batch)
        # Whatever still gets a gradient when none passes that layer lies behind it.
        if seen[deepest].requires_grad:
            seen[deepest].register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        downstream = _touched(loss, trainable)
    return Reach(trainable=frozenset(trainable), retained=retained, downstream=downstream)


def require_reach(reach: Reach) -> None:
    """Refuse a run whose retention loss could change nothing."""
    if not reach.retained:
        raise CraftError(
            "Retention would do nothing.",
            why=f"its gradient reaches none of the {len(reach.trainable)} trainable tensors.",
            fix="retain a later layer or stack, or train the part of the policy that is retained.",
            exit_code=EXIT_CHECK_FAILED,
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
    )


def describe_downstream(reach: Reach, *, frozen: bool) -> str:
    """What lies behind the deepest retained layer, and whether anything holds it."""
    if not reach.downstream:
        return "nothing trainable lies behind the deepest retained layer"
    short = sorted(".".join(name.split(".")[-2:]) for name in reach.downstream)
    names = ", ".join(short[:4]) + (f" and {len(short) - 4} more" if len(short) > 4 else "")
    if frozen:
        return f"frozen behind the deepest retained layer: {names}"
    return f"free to drift behind the deepest retained layer: {names}"


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
