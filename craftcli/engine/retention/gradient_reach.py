"""Gradient reach: which trainable parameters the retention gradient reaches, found by autograd.

Parameters downstream of the deepest retained layer get no gradient from its hidden states: unless
another mode holds them, they are free to drift, and the policy's behaviour with them. If
they are a small part of what is trained, they are frozen unless the user decides otherwise: in
Meta-World an ACT policy with a free action head kept 0.00 of its old success in one pair of tasks
and 0.40 in another, with a frozen head 0.91 and 1.00.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from craftcli.choices import Mode
from craftcli.engine.retention.terms import RetentionTerms, evaluation_mode
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.policies.base import Batch, LayerStack, Policy, PolicyAdapter
from craftcli.policies.taps import tap

SMALL_PART = 0.2
"""The largest share of the trained parameters that is frozen without being asked for."""
NEXT_TO_NOTHING = 0.01
"""The share of the trained parameters below which retention holds too little to start a run."""
LITTLE = 0.5
"""The share below which a run warns."""


@dataclass(frozen=True, kw_only=True)
class GradientReach:
    """Names of trainable parameters, by the gradients that reach them."""

    trainable: frozenset[str]
    retained: frozenset[str]
    """Reached by the retention gradient."""
    downstream: frozenset[str]
    """Reached by the task gradient on a path that bypasses the deepest retained layer."""
    free: frozenset[str]
    """Downstream parameters that no other mode holds, neither by outputs nor by weights."""
    sizes: Mapping[str, int]
    """How many numbers each trainable parameter has."""
    idle: tuple[Mode, ...] = ()
    """Modes that reach no trainable parameter: everything they hold is frozen."""

    def freezes(self, chosen: bool | None) -> bool:
        """Whether the downstream parameters are frozen: as the user chose, or found here.

        They are if nothing else holds them and if they are a small part of what is trained.
        """
        if chosen is not None:
            return chosen
        unheld = bool(self.downstream) and self.free == self.downstream
        return unheld and self.share(self.downstream) <= SMALL_PART

    def share(self, names: Collection[str], *, frozen: bool = False) -> float:
        """These parameters as a share of the trained numbers, without those that are `frozen`."""
        trained = self.trained(frozen=frozen)
        whole = sum(self.sizes[name] for name in trained)
        return sum(self.sizes[name] for name in trained.intersection(names)) / max(whole, 1)

    def trained(self, *, frozen: bool) -> frozenset[str]:
        """The parameters that are trained, if the downstream ones are frozen or not."""
        return self.trainable - self.downstream if frozen else self.trainable


def find_reach(
    policy: Policy,
    adapter: PolicyAdapter,
    terms: RetentionTerms,
    task_batch: Batch,
    *,
    only_free: bool = False,
) -> GradientReach:
    """Run a few task samples and a few anchors backward; leaves no gradients behind.

    With `only_free` the downstream parameters are not looked for if another mode holds everything.
    """
    trainable = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    downstream: frozenset[str] = frozenset()
    with _zeros_randomised(trainable.values()):
        probed = _probe(terms, trainable)
        if terms.anchors is not None and Mode.HIDDEN in terms.modes:
            manifest = terms.anchors.manifest
            stack = adapter.stack(policy, manifest.stack)
            if not (only_free and probed.held == trainable.keys()):
                deepest = max(manifest.layers)
                downstream = _downstream_of(stack, deepest, policy, trainable, task_batch)
    return GradientReach(
        trainable=frozenset(trainable),
        retained=probed.retained,
        downstream=downstream,
        free=downstream - probed.held,
        sizes={name: parameter.numel() for name, parameter in trainable.items()},
        idle=probed.idle,
    )


@dataclass(frozen=True, kw_only=True)
class _Probed:
    """Names of trainable parameters that the modes reach."""

    retained: frozenset[str]
    held: frozenset[str]
    """Reached by modes other than hidden states: a tied weight is used before and after the layer,
    and hidden states hold only its first use."""
    idle: tuple[Mode, ...]


def _probe(terms: RetentionTerms, trainable: Mapping[str, nn.Parameter]) -> _Probed:
    """Find what each mode reaches; one forward pass for each term, one backward for each mode."""
    retained: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    idle: list[Mode] = []
    for term in terms:
        for mode, probe in term.probes().items():
            names = _reached(probe, trainable, keep_graph=True)
            retained |= names
            held |= names if mode is not Mode.HIDDEN else frozenset()
            idle += [] if names else [mode]
    return _Probed(retained=retained, held=held, idle=tuple(m for m in terms.modes if m in idle))


@contextmanager
def _zeros_randomised(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Temporarily randomise all-zero parameters: LoRA's B is zero at start.

    It blocks the gradient to A until the first training step has changed it.
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


def _downstream_of(
    stack: LayerStack,
    layer: int,
    policy: Policy,
    trainable: dict[str, nn.Parameter],
    task_batch: Batch,
) -> frozenset[str]:
    """The parameters that the task gradient still reaches when it is cut at the layer."""
    with evaluation_mode(policy), tap(stack, (layer,), stop=False) as seen:
        loss, _ = policy(task_batch)
    if seen[layer].requires_grad:
        seen[layer].register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    return _reached(loss, trainable)


def require_reach(reach: GradientReach, *, frozen: bool = False) -> None:
    """Refuse a run if the retention gradient reaches next to nothing of what is trained."""
    fix = "retain a later layer or stack, or train the part of the policy that is retained."
    if not reach.retained:
        raise CraftError(
            "Retention would do nothing.",
            why=f"its gradient reaches none of the {len(reach.trainable)} trainable tensors.",
            fix=fix,
            exit_code=EXIT_CHECK_FAILED,
        )
    if reach.share(reach.retained, frozen=frozen) < NEXT_TO_NOTHING:
        raise CraftError(
            "Retention would hold next to nothing.",
            why=f"its gradient reaches {describe_share(reach, frozen=frozen)}.",
            fix=f"hold the outputs too, with --mode hidden+action; {fix}",
            exit_code=EXIT_CHECK_FAILED,
        )


def describe_share(reach: GradientReach, *, frozen: bool) -> str:
    """How much of what is trained the retention gradient reaches: tensors and numbers."""
    trained = reach.trained(frozen=frozen)
    held = len(trained & reach.retained)
    share = reach.share(reach.retained, frozen=frozen)
    return f"{held} of {len(trained)} trained tensors, {percent(share)} of the trained weights"


def describe_little(reach: GradientReach, *, frozen: bool) -> str | None:
    """A warning if retention holds less than half of what is trained; None if it holds more."""
    share = reach.share(reach.retained, frozen=frozen)
    if share >= LITTLE:
        return None
    return (
        f"retention holds {percent(share)} of the trained weights: the rest can drift. Hold the "
        "outputs too (--mode hidden+action), or retain later layers (craft cache build --layers)"
    )


def percent(share: float) -> str:
    """A share in percent that is 0 or 100 only if it is exactly that.

    >>> percent(0.9999), percent(0.0001), percent(0.25), percent(1.0)
    ('over 99 %', 'under 1 %', '25 %', '100 %')
    """
    if 0 < share < 0.01:
        return "under 1 %"
    if 0.99 < share < 1:
        return "over 99 %"
    return f"{share:.0%}".replace("%", " %")


def describe_idle(reach: GradientReach) -> str | None:
    """The modes that have no effect, and what to do about them; None if all have one."""
    if not reach.idle:
        return None
    names = ", ".join(reach.idle)
    return (
        f"{names} reaches none of the trainable tensors and holds nothing: choose another --stack "
        "or later --layers in craft cache build, or leave it out of --mode"
    )


def describe_trainable(
    policy: Policy, adapter: PolicyAdapter, reach: GradientReach, *, frozen: bool = False
) -> str:
    """How many parameters of each part of the policy are trained, and how many are held."""
    parts: dict[str, list[int]] = {}
    all_trained = reach.trained(frozen=frozen)
    for name, parameter in policy.named_parameters():
        counts = parts.setdefault(adapter.part_of(name), [0, 0])
        if name in all_trained:
            counts[0] += parameter.numel()
        if name in all_trained & reach.retained:
            counts[1] += parameter.numel()
    return ", ".join(
        f"{part} {trained / 1e6:.3f}M trained, {held / 1e6:.3f}M held"
        for part, (trained, held) in parts.items()
        if trained
    )


def describe_downstream(reach: GradientReach, *, frozen: bool) -> str:
    """The frozen parameters downstream of the deepest retained layer, or those free to drift."""
    listed = reach.downstream if frozen else reach.free
    if not listed:
        return "nothing trainable is free to drift behind what is retained"
    short = sorted(_short(name) for name in listed)
    names = ", ".join(short[:4]) + (f" and {len(short) - 4} more" if len(short) > 4 else "")
    part = percent(reach.share(listed))
    if frozen:
        return f"frozen behind the deepest retained layer ({part}): {names}"
    return f"free to drift behind the deepest retained layer ({part}): {names}"


def _short(name: str) -> str:
    """The last two parts of a name, without the suffix that all LoRA weights share."""
    return ".".join(re.sub(r"\.(lora_\w+)\.\w+\.weight$", r".\1", name).split(".")[-2:])


def freeze(policy: nn.Module, names: frozenset[str]) -> None:
    """Exclude these parameters from training."""
    for name, parameter in policy.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def _reached(
    loss: Tensor, parameters: Mapping[str, nn.Parameter], *, keep_graph: bool = False
) -> frozenset[str]:
    """The names of the parameters with a gradient of the loss that is not zero."""
    for parameter in parameters.values():
        parameter.grad = None
    if loss.requires_grad:
        # Probes share a forward pass.
        loss.backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
    reached = frozenset(
        name for name, p in parameters.items() if p.grad is not None and p.grad.count_nonzero()
    )
    for parameter in parameters.values():
        parameter.grad = None
    return reached
