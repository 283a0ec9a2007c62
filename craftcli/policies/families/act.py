"""ACT: a transformer encoder over latent, states and images, and a decoder over the actions."""

from collections.abc import Sequence
from typing import ClassVar, override

import torch
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_IMAGES, OBS_STATE
from torch import Tensor

from craftcli.choices import OutputKind, Pooling
from craftcli.policies.base import (
    Batch,
    FeatureRequest,
    Features,
    LayerStack,
    Policy,
    PolicyAdapter,
    PolicyOutput,
)
from craftcli.policies.cameras import camera_images
from craftcli.policies.pooling import TokenMasks
from craftcli.policies.taps import tap
from craftcli.policies.tokens import ACTION_IS_PAD, action_masks, counted_actions

ENCODER, DECODER = "encoder", "decoder"


class ActAdapter(PolicyAdapter):
    """Reads both transformers of ACT. In evaluation mode the latent is zero and no action is read.

    With the dataset's actions, those beyond the end of an episode do not count, as in ACT's own
    loss. With the policy's own actions, all count.
    """

    policy_types: ClassVar[tuple[str, ...]] = ("act",)
    stack_names: ClassVar[tuple[str, ...]] = (ENCODER, DECODER)
    default_stack: ClassVar[str] = DECODER
    # LeRobot's ACT has one decoder layer by default.
    default_layers: ClassVar[tuple[int, ...]] = (-1,)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"image", "text", "action"})
    output_kind: ClassVar[OutputKind] = OutputKind.VECTORS

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        return {
            ENCODER: LayerStack.of_modules(policy.model.encoder.layers),
            DECODER: LayerStack.of_modules(policy.model.decoder.layers),
        }

    @override
    def tokens_of(self, stack: str) -> frozenset[str]:
        return frozenset({"image", "text"} if stack == ENCODER else {"action"})

    @override
    def pooling_of(self, stack: str) -> Pooling:
        return Pooling.MEAN_MASKED if stack == ENCODER else self.default_pooling

    @override
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        # ACT reads the device of the state even when it has no state input.
        states = (OBS_STATE, OBS_ENV_STATE) if policy.config.env_state_feature else (OBS_STATE,)
        padded = ACTION_IS_PAD in batch and (request.stack != ENCODER or request.output)
        padding = (ACTION_IS_PAD,) if padded else ()
        return (*self.image_keys(policy, batch), *states, *padding)

    @override
    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        if not own_actions:
            return batch
        return {key: value for key, value in batch.items() if key not in (ACTION, ACTION_IS_PAD)}

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        dtype: torch.dtype = policy.model.action_head.weight.dtype
        return dtype

    @override
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        observed = dict(batch)
        if policy.config.image_features:
            observed[OBS_IMAGES] = camera_images(policy, batch)
        stack = self.stack(policy, request.stack or self.default_stack)
        counted = counted_actions(batch, policy.config.chunk_size, of=batch[OBS_STATE])
        output = None
        with tap(stack, request.layers, stop=not request.output) as seen:
            actions, _ = policy.model(observed)
            output = PolicyOutput(values=actions, mask=counted)
        hidden = {layer: states.transpose(0, 1) for layer, states in seen.items()}
        if request.stack == ENCODER and hidden:
            masks = _encoder_masks(policy, next(iter(hidden.values())))
        else:
            masks = action_masks(counted)
        return Features(hidden=hidden, masks=masks, output=output)


def _encoder_masks(policy: Policy, hidden: Tensor) -> TokenMasks:
    """The tokens are the latent and the states, then the pixels of each camera's feature map."""
    rows, length = hidden.shape[:2]
    vectors = policy.model.encoder_1d_feature_pos_embed.num_embeddings
    position = torch.arange(length, device=hidden.device).expand(rows, length)
    return TokenMasks(
        image=position >= vectors, text=position < vectors, action=torch.zeros_like(position) > 0
    )
