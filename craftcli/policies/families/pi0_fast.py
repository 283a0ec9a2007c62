"""pi0_fast: one PaliGemma stack over images, language (with the state as text) and FAST tokens."""

from collections.abc import Sequence
from typing import Any, ClassVar, override

import torch
from lerobot.utils.constants import (
    ACTION_TOKEN_MASK,
    ACTION_TOKENS,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
)
from torch import Tensor, nn

from craftcli.choices import IGNORED_LABEL, OutputKind, Pooling
from craftcli.policies.attention_masks import additive
from craftcli.policies.base import (
    VISION_LANGUAGE_PARTS,
    Batch,
    FeatureRequest,
    Features,
    LayerStack,
    Policy,
    PolicyAdapter,
    PolicyOutput,
)
from craftcli.policies.pooling import TokenMasks
from craftcli.policies.shard_units import paligemma_units
from craftcli.policies.taps import may_stop, tap


class Pi0FastAdapter(PolicyAdapter):
    """Reads the language model of pi0_fast; its action tokens are teacher-forced."""

    policy_types: ClassVar[tuple[str, ...]] = ("pi0_fast",)
    stack_names: ClassVar[tuple[str, ...]] = ("vlm",)
    default_stack: ClassVar[str] = "vlm"
    default_layers: ClassVar[tuple[int, ...]] = (-2, -1)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"image", "text", "action"})
    output_kind: ClassVar[OutputKind] = OutputKind.TOKENS
    pads_vectors: ClassVar[bool] = True
    reported_parts: ClassVar[tuple[str, ...]] = VISION_LANGUAGE_PARTS

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        language_model = _paligemma(policy).model.language_model
        return {"vlm": LayerStack.of_norms(language_model.layers, language_model.norm)}

    @override
    def shard_units(self, policy: Policy) -> list[nn.Module]:
        return paligemma_units(_paligemma(policy))

    @override
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        images = self.image_keys(policy, batch)
        actions = (ACTION_TOKENS, ACTION_TOKEN_MASK) if _over_actions(request) else ()
        return (*images, OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK, *actions)

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        first_layer: Any = _paligemma(policy).model.language_model.layers[0]
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
    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        if not own_actions:
            return batch
        tokens, mask = _own_tokens(policy, batch)
        return {**batch, ACTION_TOKENS: tokens, ACTION_TOKEN_MASK: mask}

    @override
    def labels(self, batch: Batch) -> Tensor:
        # The first action token is an input only; each one predicts the next.
        mask = batch[ACTION_TOKEN_MASK][:, 1:].bool()
        return torch.where(mask, batch[ACTION_TOKENS][:, 1:], IGNORED_LABEL)

    @override
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        model: Any = policy.model
        images, image_masks = policy._preprocess_images(batch)
        over_actions = _over_actions(request)
        embeddings, pad_mask, attention, image_length, action_length = model.embed_prefix_fast(
            images,
            image_masks,
            batch[OBS_LANGUAGE_TOKENS],
            batch[OBS_LANGUAGE_ATTENTION_MASK],
            batch[ACTION_TOKENS] if over_actions else None,
            batch[ACTION_TOKEN_MASK] if over_actions else None,
        )
        # The policy's own forward casts the embeddings the same way.
        embeddings = embeddings.to(self.compute_dtype(policy))
        masks = _masks(pad_mask, image_length, action_length)
        output = None
        stop = may_stop(policy, request)
        with tap(self.stack(policy, "vlm"), request.layers, stop=stop) as hidden:
            (states, _), _ = model.paligemma_with_expert.forward(
                attention_mask=additive(attention, embeddings.dtype),
                position_ids=torch.cumsum(pad_mask, dim=1) - 1,
                past_key_values=None,
                inputs_embeds=[embeddings, None],
                use_cache=False,
                adarms_cond=[None, None],
            )
            if request.output:
                # All action positions but the last, which predicts nothing.
                logits = _paligemma(policy).lm_head(states[:, -action_length:][:, :-1])
                output = PolicyOutput(values=logits, mask=masks.action[:, -action_length:][:, 1:])
        return Features(hidden=hidden, masks=masks, output=output)


def _over_actions(request: FeatureRequest) -> bool:
    return request.with_actions or request.output


@torch.no_grad()
def _own_tokens(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """The action tokens of greedy decoding, and their mask, in the preprocessor's layout of labels.

    That is a start token, the decoded tokens up to and including the end marker, then padding.
    """
    model, tokenizer = policy.model, policy.model._paligemma_tokenizer
    images, image_masks = policy._preprocess_images(batch)
    language = batch[OBS_LANGUAGE_TOKENS]
    length = policy.config.max_action_tokens
    decoded = model.sample_actions_fast_kv_cache(
        images,
        image_masks,
        language,
        batch[OBS_LANGUAGE_ATTENTION_MASK],
        max_decoding_steps=length - 1,
        temperature=0.0,
    )
    ended = decoded == tokenizer.convert_tokens_to_ids("|")
    kept = (ended.cumsum(1) - ended.int()) == 0
    start = torch.full_like(decoded[:, :1], tokenizer.bos_token_id)
    tokens = torch.cat([start, torch.where(kept, decoded, 0)], dim=1)
    return tokens, torch.cat([torch.ones_like(kept[:, :1]), kept], dim=1)


def _paligemma(policy: Policy) -> Any:
    return policy.model.paligemma_with_expert.paligemma


def _masks(pad_mask: Tensor, image_length: int, action_length: int) -> TokenMasks:
    """The tokens are images, then language, then actions; `pad_mask` says which are no padding."""
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
