"""pi0: like pi05, but the state is a token of the expert, and time is mixed into the actions."""

from typing import ClassVar, override

import torch
from lerobot.utils.constants import OBS_STATE
from torch import Tensor

from craftcli.policies.base import Batch, FeatureRequest, Policy
from craftcli.policies.families.flow import EXPERT, Stream, over_actions
from craftcli.policies.families.pi05 import Pi05Adapter
from craftcli.policies.pooling import TokenMasks


class Pi0Adapter(Pi05Adapter):
    """Reads PaliGemma and the action expert of pi0."""

    policy_types: ClassVar[tuple[str, ...]] = ("pi0",)

    @override
    def tokens_of(self, stack: str) -> frozenset[str]:
        return super().tokens_of(stack) | ({"text"} if stack == EXPERT else frozenset())

    @override
    def saved_name(self, name: str) -> str:
        name = name.replace("model.language_model.embed_tokens.weight", "lm_head.weight")
        return name.replace("model.action_time_mlp_", "model.time_mlp_")

    @override
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        state = (OBS_STATE,) if over_actions(request) else ()
        return (*super().input_keys(policy, batch, request), *state)

    @override
    def suffix(self, policy: Policy, batch: Batch, noisy_actions: Tensor, time: Tensor) -> Stream:
        embeddings, pad_mask, blocks, condition = policy.model.embed_suffix(
            policy.prepare_state(batch), noisy_actions, time
        )
        is_state = torch.arange(pad_mask.shape[1], device=pad_mask.device) == 0
        masks = TokenMasks(
            image=torch.zeros_like(pad_mask),
            text=pad_mask & is_state,
            action=pad_mask & ~is_state,
            action_span=(1, pad_mask.shape[1]),
        )
        return Stream(
            embeddings=embeddings,
            pad_mask=pad_mask,
            blocks=blocks,
            masks=masks,
            condition=condition,
        )
