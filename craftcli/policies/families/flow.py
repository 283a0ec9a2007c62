"""Flow matching with an action expert beside a language model: shared by pi0, pi05 and smolvla.

Not a family itself: `FlowAdapter` leaves to its subclasses how the two token sequences are embedded
(`prefix`, `suffix`) and how the two transformers run (`run`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, override

import torch
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor, nn

from craftcli.choices import OutputKind, Pooling
from craftcli.policies.attention_masks import block_attention
from craftcli.policies.base import (
    NOISE,
    TIME,
    VISION_LANGUAGE_PARTS,
    Batch,
    FeatureRequest,
    Features,
    Policy,
    PolicyAdapter,
    PolicyOutput,
)
from craftcli.policies.pooling import TokenMasks
from craftcli.policies.taps import may_stop, tap
from craftcli.policies.tokens import ACTION_IS_PAD, counted_actions, nothing_padded

VLM = "vlm"
EXPERT = "expert"


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """The tokens that one of the two transformers reads, already embedded."""

    embeddings: Tensor
    """[B, S, D]."""
    pad_mask: Tensor
    """[B, S] bool: True where there is a token."""
    blocks: Tensor
    """[B, S]: 1 where a block of attention starts; LeRobot builds its attention masks from it."""
    masks: TokenMasks
    condition: Tensor | None = None
    """The vector that modulates the norms; None in families without one."""


class FlowAdapter(PolicyAdapter):
    """Reads two transformers: the prefix (images, language) in one, noisy actions in the other.

    They attend jointly, layer by layer. No token of the prefix attends to the actions.
    """

    stack_names: ClassVar[tuple[str, ...]] = (VLM, EXPERT)
    # Measured in examples/family_defaults (tiny policies, one seed): with the expert held, the
    # actions of pi0 and smolvla moved 22 and 8 times less than with nothing held. Holding the
    # language model made no difference.
    default_stack: ClassVar[str] = EXPERT
    default_layers: ClassVar[tuple[int, ...]] = (-2, -1)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"image", "text", "action"})
    output_kind: ClassVar[OutputKind] = OutputKind.VECTORS
    pads_vectors: ClassVar[bool] = True
    reported_parts: ClassVar[tuple[str, ...]] = VISION_LANGUAGE_PARTS

    @abstractmethod
    def prefix(self, policy: Policy, batch: Batch) -> Stream:
        """The tokens that the language model reads."""

    @abstractmethod
    def suffix(self, policy: Policy, batch: Batch, noisy_actions: Tensor, time: Tensor) -> Stream:
        """The tokens that the expert reads."""

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
        """Run the policy's transformers. Returns the expert's states, if there is a suffix."""

    @abstractmethod
    def language_model(self, policy: Policy) -> nn.Module:
        """The vision-language model, with its vision tower."""

    @override
    def tokens_of(self, stack: str) -> frozenset[str]:
        return frozenset({"image", "text"} if stack == VLM else {"action"})

    @override
    def pooling_of(self, stack: str) -> Pooling:
        return Pooling.VISION_TEXT if stack == VLM else self.default_pooling

    @override
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        language = (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)
        flow = (NOISE, TIME, ACTION) if over_actions(request) else ()
        padding = (ACTION_IS_PAD,) if request.output and ACTION_IS_PAD in batch else ()
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
            # `start` is not reused as NOISE: these actions were denoised from it, and no training
            # step pairs actions with the noise that they came from.
            completed[ACTION] = policy.predict_action_chunk(dict(batch), noise=start)
            completed[ACTION_IS_PAD] = nothing_padded(completed[ACTION])
        return completed

    @override
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        stack = request.stack or self.default_stack
        points = self.stack(policy, stack)
        prefix, suffix, output = self.prefix(policy, batch), None, None
        if over_actions(request):
            time = batch[TIME][:, None, None]
            noisy = time * batch[NOISE] + (1 - time) * policy.prepare_action(batch)
            suffix = self.suffix(policy, batch, noisy, batch[TIME])
        with tap(points, request.layers, stop=may_stop(policy, request)) as hidden:
            states = self._joint(policy, prefix, suffix)
            if request.output:
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
            attention=block_attention(pad_mask, blocks),
            positions=torch.cumsum(pad_mask, dim=1) - 1,
        )


def over_actions(request: FeatureRequest) -> bool:
    """Whether the expert must run: states of the language model alone need no actions."""
    return request.output or request.stack != VLM


def _draw(policy: Policy, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Time, noise, and the noise that sampling starts from, for one row.

    The policy's own functions take no generator, so torch's default one is seeded for them. They
    draw on the CPU: the numbers are then the same for every device.
    """
    shape = (1, policy.config.chunk_size, policy.config.max_action_dim)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return (
            policy.model.sample_time(1, "cpu"),
            policy.model.sample_noise(shape, "cpu"),
            policy.model.sample_noise(shape, "cpu"),
        )


def _velocity(policy: Policy, states: Tensor, batch: Batch) -> PolicyOutput:
    """The velocity that the expert predicts, without the padding of the action dimensions."""
    actions = states[:, -policy.config.chunk_size :].to(torch.float32)
    # Of the batch: anchors may come from another robot than the task.
    size = batch[ACTION].shape[-1]
    values: Tensor = policy.model.action_out_proj(actions)[:, :, :size]
    return PolicyOutput(values=values, mask=counted_actions(batch, values.shape[1], of=values))
