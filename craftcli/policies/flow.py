"""Flow matching by an action expert beside a language model: what pi0, pi05 and smolvla share."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, override

import torch
from lerobot.policies.common.vla_utils import make_att_2d_masks
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor

from craftcli.cache.pooling import TokenMasks
from craftcli.choices import OutputKind, Pooling
from craftcli.policies.base import (
    NOISE,
    TIME,
    Batch,
    Features,
    Output,
    Policy,
    PolicyAdapter,
    Wanted,
)
from craftcli.policies.taps import tap
from craftcli.policies.tokens import ACTION_IS_PAD, counted_actions, nothing_padded

VLM = "vlm"
EXPERT = "expert"


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """The tokens that one of the two transformers reads."""

    embeddings: Tensor
    """[B, S, D]."""
    pad_mask: Tensor
    """[B, S] bool: True where there is a token."""
    blocks: Tensor
    """[B, S]: 1 where a block of attention starts, as LeRobot builds its masks from."""
    masks: TokenMasks
    condition: Tensor | None = None
    """What modulates the norms, where the family has such."""


class FlowAdapter(PolicyAdapter):
    """A prefix of images and language in one transformer, noisy actions in another beside it.

    Both attend jointly, layer by layer; no token of the prefix looks at the actions.
    """

    stack_names: ClassVar[tuple[str, ...]] = (VLM, EXPERT)
    # Measured in examples/family_defaults (tiny policies, one seed): the actions of pi0 and smolvla
    # moved 22 and 8 times less than with nothing held; holding the language model held nothing.
    default_stack: ClassVar[str] = EXPERT
    default_layers: ClassVar[tuple[int, ...]] = (-2, -1)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"image", "text", "action"})
    output_kind: ClassVar[OutputKind] = OutputKind.VECTORS

    @abstractmethod
    def prefix(self, policy: Policy, batch: Batch) -> Stream:
        """What the language model reads."""

    @abstractmethod
    def suffix(self, policy: Policy, batch: Batch, noisy_actions: Tensor, time: Tensor) -> Stream:
        """What the expert reads."""

    @abstractmethod
    def run(
        self,
        policy: Policy,
        prefix: Stream,
        suffix: Stream | None,
        *,
        attention: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Run the transformers of the policy; what the expert returns, if it has a suffix."""

    def recomputes(self, policy: Policy) -> bool:
        """Whether layers are run again in the backward pass, to save memory."""
        return False

    @override
    def tokens_of(self, stack: str) -> frozenset[str]:
        return frozenset({"image", "text"} if stack == VLM else {"action"})

    @override
    def pooling_of(self, stack: str) -> Pooling:
        return Pooling.VISION_TEXT if stack == VLM else self.default_pooling

    @override
    def input_keys(self, policy: Policy, batch: Batch, wanted: Wanted) -> tuple[str, ...]:
        language = (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)
        flow = (NOISE, TIME, ACTION) if over_actions(wanted) else ()
        padding = (ACTION_IS_PAD,) if wanted.output and ACTION_IS_PAD in batch else ()
        return (*self.image_keys(policy, batch), *language, *flow, *padding)

    @override
    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        draws = [_draw(policy, seed) for seed in seeds]
        device = batch[OBS_LANGUAGE_TOKENS].device
        time, noise, start = (torch.cat(drawn).to(device) for drawn in zip(*draws, strict=True))
        completed = {**batch, NOISE: noise, TIME: time}
        if own_actions:
            # Mixed with a noise of their own, the actions lie where sampling passes: noise that the
            # same actions grew from would be paired with them, as in no training step.
            completed[ACTION] = policy.predict_action_chunk(dict(batch), noise=start)
            completed[ACTION_IS_PAD] = nothing_padded(completed[ACTION])
        return completed

    @override
    def features(self, policy: Policy, batch: Batch, wanted: Wanted) -> Features:
        stack = wanted.stack or self.default_stack
        points = self.stack(policy, stack)
        prefix, suffix, output = self.prefix(policy, batch), None, None
        if over_actions(wanted):
            time = batch[TIME][:, None, None]
            noisy = time * batch[NOISE] + (1 - time) * policy.prepare_action(batch)
            suffix = self.suffix(policy, batch, noisy, batch[TIME])
        # An exception in the midst of a layer that is to be recomputed would leave it half open.
        stop = not (wanted.output or self.recomputes(policy))
        with tap(points, wanted.layers, stop=stop) as hidden:
            states = self._joint(policy, prefix, suffix)
            if wanted.output:
                output = _velocity(policy, states, batch)
        read = prefix if suffix is None or stack == VLM else suffix
        return Features(hidden=hidden, masks=read.masks, output=output)

    def _joint(self, policy: Policy, prefix: Stream, suffix: Stream | None) -> Tensor:
        streams = [prefix] if suffix is None else [prefix, suffix]
        pad_mask = torch.cat([stream.pad_mask for stream in streams], dim=1)
        blocks = torch.cat([stream.blocks for stream in streams], dim=1)
        return self.run(
            policy,
            prefix,
            suffix,
            attention=make_att_2d_masks(pad_mask, blocks),
            positions=torch.cumsum(pad_mask, dim=1) - 1,
        )


def over_actions(wanted: Wanted) -> bool:
    """Whether the expert has to run: the language model alone needs no actions."""
    return wanted.output or wanted.stack != VLM


def _draw(policy: Policy, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Time, noise, and the noise that sampling starts from, of one row.

    The policy's own draws take no generator, so that torch's is lent to them, on the CPU: the
    numbers are then the same for every device.
    """
    shape = (1, policy.config.chunk_size, policy.config.max_action_dim)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return (
            policy.model.sample_time(1, "cpu"),
            policy.model.sample_noise(shape, "cpu"),
            policy.model.sample_noise(shape, "cpu"),
        )


def _velocity(policy: Policy, states: Tensor, batch: Batch) -> Output:
    """What the expert's states say of the velocity, without the dimensions that fill up."""
    actions = states[:, -policy.config.chunk_size :].to(torch.float32)
    size = policy.config.action_feature.shape[0]
    values: Tensor = policy.model.action_out_proj(actions)[:, :, :size]
    return Output(values=values, mask=counted_actions(batch, values.shape[1], of=values))
