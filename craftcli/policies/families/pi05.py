"""pi05: PaliGemma over images and language (with the state as text), and a Gemma action expert."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, override

import torch
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor, nn

from craftcli.errors import CraftError
from craftcli.policies.attention_masks import additive
from craftcli.policies.base import Batch, LayerStack, Policy
from craftcli.policies.families.flow import EXPERT, VLM, FlowAdapter, Stream
from craftcli.policies.pooling import TokenMasks
from craftcli.policies.shard_units import attention_units, paligemma_units
from craftcli.policies.tokens import action_masks


class Pi05Adapter(FlowAdapter):
    """Reads PaliGemma and the action expert of pi05."""

    policy_types: ClassVar[tuple[str, ...]] = ("pi05",)

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        models = {
            VLM: _language_model(policy),
            EXPERT: policy.model.paligemma_with_expert.gemma_expert.model,
        }
        return {name: LayerStack.of_norms(m.layers, m.norm) for name, m in models.items()}

    @override
    def language_model(self, policy: Policy) -> nn.Module:
        model: nn.Module = policy.model.paligemma_with_expert.paligemma
        return model

    @override
    def shard_units(self, policy: Policy) -> list[nn.Module]:
        paligemma = policy.model.paligemma_with_expert.paligemma
        expert = policy.model.paligemma_with_expert.gemma_expert
        # The head of the expert is as large as its vocabulary, and never used.
        return [
            *paligemma_units(paligemma),
            *attention_units(expert.model.layers),
            expert.lm_head,
        ]

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        dtype: torch.dtype = _language_model(policy).layers[0].self_attn.q_proj.weight.dtype
        return dtype

    @override
    def saved_name(self, name: str) -> str:
        # LeRobot fills the embedding from the head, and also accepts openpi's name of the time MLP.
        name = name.replace("model.language_model.embed_tokens.weight", "lm_head.weight")
        return name.replace("model.time_mlp_", "model.action_time_mlp_")

    @override
    def prefix(self, policy: Policy, batch: Batch) -> Stream:
        _refuse_memory(policy)
        images, image_masks = policy._preprocess_images(batch)
        language = batch[OBS_LANGUAGE_TOKENS]
        embeddings, pad_mask, blocks = policy.model.embed_prefix(
            images, image_masks, language, batch[OBS_LANGUAGE_ATTENTION_MASK]
        )
        image_length = pad_mask.shape[1] - language.shape[1]
        is_image = torch.arange(pad_mask.shape[1], device=pad_mask.device) < image_length
        masks = TokenMasks(
            image=pad_mask & is_image,
            text=pad_mask & ~is_image,
            action=torch.zeros_like(pad_mask),
        )
        return Stream(embeddings=embeddings, pad_mask=pad_mask, blocks=blocks, masks=masks)

    @override
    def suffix(self, policy: Policy, batch: Batch, noisy_actions: Tensor, time: Tensor) -> Stream:
        embeddings, pad_mask, blocks, condition = policy.model.embed_suffix(noisy_actions, time)
        return Stream(
            embeddings=embeddings,
            pad_mask=pad_mask,
            blocks=blocks,
            masks=action_masks(pad_mask),
            condition=condition,
        )

    @override
    def run(
        self,
        policy: Policy,
        prefix: Stream,
        suffix: Stream | None,
        *,
        attention: Tensor,
        positions: Tensor,
    ) -> Tensor:
        if suffix is None:
            # LeRobot's sampling sets this and never resets it. Without it here, states would differ
            # in their last bits between a policy that has sampled before and one that has not.
            _language_model(policy).config._attn_implementation = "eager"
        # The policy's own forward casts the embeddings the same way.
        dtype = self.compute_dtype(policy)
        states: Tensor
        with _recomputing(policy):
            (_, states), _ = policy.model.paligemma_with_expert.forward(
                attention_mask=additive(attention),
                position_ids=positions,
                past_key_values=None,
                inputs_embeds=[
                    stream if stream is None else stream.embeddings.to(dtype)
                    for stream in (prefix, suffix)
                ],
                use_cache=False,
                adarms_cond=[None, None if suffix is None else suffix.condition],
            )
        return states


def _refuse_memory(policy: Policy) -> None:
    """Refuse the memory of earlier frames that pi05 can have in LeRobot after 0.6.1."""
    memories = ("use_visual_memory", "use_proprioceptive_memory")
    switched_on = [name for name in memories if getattr(policy.config, name, False)]
    if switched_on:
        raise CraftError(
            "This pi05 policy cannot be retained.",
            why=f"{' and '.join(switched_on)} of its configuration makes it act on earlier frames "
            "too, which craft does not store.",
            fix="retain a policy that was trained without memory, or use --mode l2sp, which needs "
            "no anchors.",
        )


@contextmanager
def _recomputing(policy: Policy) -> Iterator[None]:
    """Keep gradient checkpointing active for anchors, which run in evaluation mode.

    LeRobot recomputes layers only if the module around both transformers is in training mode. That
    module uses the flag for nothing else; the modules inside it, with the dropout, keep theirs.
    """
    module, model = policy.model.paligemma_with_expert, policy.model
    before = module.training
    module.training = before or (model.gradient_checkpointing_enabled and model.training)
    try:
        yield
    finally:
        module.training = before


def _language_model(policy: Policy) -> Any:
    return policy.model.paligemma_with_expert.paligemma.model.language_model
