"""pi0_fast: one PaliGemma stack over images, language (with the state as text) and FAST tokens."""

from typing import Any, ClassVar, override

import torch
from lerobot.policies.common.vla_utils import prepare_attention_masks_4d
from lerobot.utils.constants import (
    ACTION_TOKEN_MASK,
    ACTION_TOKENS,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
)
from torch import Tensor

from craftcli.cache.pooling import TokenMasks
from craftcli.choices import Pooling
from craftcli.policies.base import Batch, Features, LayerStack, Policy, PolicyAdapter
from craftcli.policies.taps import tap


class Pi0FastAdapter(PolicyAdapter):
    """Taps the language model of pi0_fast, action tokens under teacher forcing."""

    policy_types: ClassVar[tuple[str, ...]] = ("pi0_fast", "craft_tiny_pi0_fast")
    default_stack: ClassVar[str] = "vlm"
    default_layers: ClassVar[tuple[int, ...]] = (-2, -1)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"image", "text", "action"})

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        language_model = _paligemma(policy).model.language_model
        return {"vlm": LayerStack(layers=language_model.layers, norm=language_model.norm)}

    @override
    def input_keys(self, policy: Policy, batch: Batch, *, with_actions: bool) -> tuple[str, ...]:
        images = self.image_keys(policy, batch)
        actions = (ACTION_TOKENS, ACTION_TOKEN_MASK) if with_actions else ()
        return (*images, OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK, *actions)

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        first_layer: Any = self.stack(policy, "vlm").layers[0]
        dtype: torch.dtype = first_layer.self_attn.q_proj.weight.dtype
        return dtype

    @override
    def saved_name(self, name: str) -> str:
        # LeRobot fills the embedding from the head when a checkpoint has only the head.
        return name.replace("model.language_model.embed_tokens.weight", "lm_head.weight")

    @override
    def processor_overrides(self, config: Any) -> dict[str, dict[str, Any]]:
        return {
            "tokenizer_processor": {"tokenizer_name": config.text_tokenizer_name},
            "action_tokenizer_processor": {
                "action_tokenizer_name": config.action_tokenizer_name,
                "paligemma_tokenizer_name": config.text_tokenizer_name,
                "fast_skip_tokens": config.fast_skip_tokens,
            },
        }

    @override
    def features(
        self,
        policy: Policy,
        batch: Batch,
        *,
        stack: str,
        layers: tuple[int, ...],
        with_actions: bool,
    ) -> Features:
        model: Any = policy.model
        images, image_masks = policy._preprocess_images(batch)
        embeddings, pad_mask, attention, image_length, action_length = model.embed_prefix_fast(
            images,
            image_masks,
            batch[OBS_LANGUAGE_TOKENS],
            batch[OBS_LANGUAGE_ATTENTION_MASK],
            batch[ACTION_TOKENS] if with_actions else None,
            batch[ACTION_TOKEN_MASK] if with_actions else None,
        )
        # The policy's own forward casts the embeddings the same way.
        embeddings = embeddings.to(self.compute_dtype(policy))
        with tap(self.stack(policy, stack), layers) as hidden:
            model.paligemma_with_expert.forward(
                attention_mask=prepare_attention_masks_4d(attention, dtype=embeddings.dtype),
                position_ids=torch.cumsum(pad_mask, dim=1) - 1,
                past_key_values=None,
                inputs_embeds=[embeddings, None],
                use_cache=False,
                adarms_cond=[None, None],
            )
        return Features(hidden=hidden, masks=_masks(pad_mask, image_length, action_length))


def _paligemma(policy: Policy) -> Any:
    return policy.model.paligemma_with_expert.paligemma


def _masks(pad_mask: Tensor, image_length: int, action_length: int) -> TokenMasks:
    """Images first, then language, then actions, each valid where the policy's pad mask says so."""
    total = pad_mask.shape[1]
    text_end = total - action_length
    position = torch.arange(total, device=pad_mask.device)
    valid = pad_mask.bool()
    return TokenMasks(
        image=valid & (position < image_length),
        text=valid & (position >= image_length) & (position < text_end),
        action=valid & (position >= text_end),
        action_span=(text_end, total),
    )
