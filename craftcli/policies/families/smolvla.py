"""smolvla: SmolVLM over images, language and state, and an expert that attends to its keys."""

from collections.abc import Sequence
from typing import Any, ClassVar, override

import torch
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor, nn
from torch.nn import functional

from craftcli.errors import CraftError
from craftcli.policies.base import Batch, FeatureRequest, LayerStack, Policy
from craftcli.policies.families.flow import EXPERT, VLM, FlowAdapter, Stream
from craftcli.policies.pooling import TokenMasks
from craftcli.policies.shard_units import attention_units, vision_units
from craftcli.policies.taps import tap
from craftcli.policies.tokens import action_masks


class SmolVLAAdapter(FlowAdapter):
    """Reads both transformers of smolvla. By default LeRobot trains only the expert."""

    policy_types: ClassVar[tuple[str, ...]] = ("smolvla",)

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        text, expert = _text_model(policy), policy.model.vlm_with_expert.lm_expert
        return {
            VLM: LayerStack.of_norms(text.layers, text.norm),
            EXPERT: LayerStack.of_norms(expert.layers, expert.norm),
        }

    @override
    def language_model(self, policy: Policy) -> nn.Module:
        model: nn.Module = policy.model.vlm_with_expert.vlm
        return model

    @override
    def shard_units(self, policy: Policy) -> list[nn.Module]:
        both = policy.model.vlm_with_expert
        layers = [*_text_model(policy).layers, *both.lm_expert.layers]
        ends = [_text_model(policy).embed_tokens, both.vlm.lm_head]
        return [*attention_units(layers), *vision_units(both.get_vlm_model().vision_model), *ends]

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        # The language model may be in bfloat16 and the expert beside it in float32.
        models = (_text_model(policy), policy.model.vlm_with_expert.lm_expert)
        one, other = (model.layers[0].self_attn.q_proj.weight.dtype for model in models)
        return torch.promote_types(one, other)

    @override
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        cameras = self.image_keys(policy, batch)
        masks = tuple(key for key in map(_mask_of, cameras) if key in batch)
        return (*super().input_keys(policy, batch, request), OBS_STATE, *masks)

    @override
    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        # LeRobot pads to the longest prompt of a batch; a cache needs one length for all rows.
        missing = policy.config.tokenizer_max_length - batch[OBS_LANGUAGE_TOKENS].shape[1]
        padded = {
            key: functional.pad(batch[key], (0, max(missing, 0)))
            for key in (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)
        }
        return super().anchor_inputs(
            policy, {**batch, **padded}, seeds=seeds, own_actions=own_actions
        )

    @override
    def prefix(self, policy: Policy, batch: Batch) -> Stream:
        if policy.config.adapt_to_pi_aloha:
            raise CraftError(
                "This smolvla policy cannot be retained.",
                why="adapt_to_pi_aloha changes states and actions inside LeRobot's forward pass.",
                fix="convert the dataset instead, and set adapt_to_pi_aloha to false.",
            )
        model: Any = policy.model
        images, image_masks = policy.prepare_images(batch)
        connector = model.vlm_with_expert.get_vlm_model().connector
        with tap(LayerStack.of_modules([connector]), (0,), stop=False) as seen:
            embeddings, pad_mask, blocks = model.embed_prefix(
                images,
                image_masks,
                batch[OBS_LANGUAGE_TOKENS],
                batch[OBS_LANGUAGE_ATTENTION_MASK],
                state=policy.prepare_state(batch),
            )
        around = (2, 1) if model.add_image_special_tokens else (0, 0)
        image = _image_positions(pad_mask, len(images), seen[0].shape[1], around)
        masks = TokenMasks(image=image, text=pad_mask & ~image, action=torch.zeros_like(pad_mask))
        return Stream(embeddings=embeddings, pad_mask=pad_mask, blocks=blocks, masks=masks)

    @override
    def suffix(self, policy: Policy, batch: Batch, noisy_actions: Tensor, time: Tensor) -> Stream:
        embeddings, pad_mask, blocks = policy.model.embed_suffix(noisy_actions, time)
        return Stream(
            embeddings=embeddings, pad_mask=pad_mask, blocks=blocks, masks=action_masks(pad_mask)
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
        states: Tensor
        (_, states), _ = policy.model.vlm_with_expert.forward(
            attention_mask=attention,
            position_ids=positions,
            past_key_values=None,
            inputs_embeds=[prefix.embeddings, None if suffix is None else suffix.embeddings],
            # As in sampling: the language model can run alone only to fill a key-value cache.
            use_cache=suffix is None,
        )
        return states


def _text_model(policy: Policy) -> Any:
    return policy.model.vlm_with_expert.get_vlm_model().text_model


def _mask_of(camera: str) -> str:
    """The batch entry that says which rows have this camera."""
    return f"{camera}_padding_mask"


def _image_positions(
    pad_mask: Tensor, cameras: int, per_camera: int, around: tuple[int, int]
) -> Tensor:
    """[B, S] bool: the image tokens at the start, without the text markers around each image."""
    before, after = around
    camera = [False] * before + [True] * per_camera + [False] * after
    images = torch.tensor(camera * cameras, device=pad_mask.device)
    return pad_mask & functional.pad(images, (0, pad_mask.shape[1] - len(images)))
