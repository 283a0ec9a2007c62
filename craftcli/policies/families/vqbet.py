"""VQ-BeT: a GPT over images, states and action queries, and a head of codes and offsets."""

from typing import Any, ClassVar, override

import torch
from lerobot.utils.constants import OBS_IMAGES, OBS_STATE
from torch import Tensor
from torch.nn import functional

from craftcli.choices import OutputKind, Pooling
from craftcli.policies.base import (
    Batch,
    FeatureRequest,
    Features,
    LayerStack,
    Policy,
    PolicyAdapter,
    PolicyOutput,
    TapPoint,
)
from craftcli.policies.cameras import camera_images
from craftcli.policies.pooling import TokenMasks
from craftcli.policies.taps import tap


class VqBetAdapter(PolicyAdapter):
    """Reads the GPT of VQ-BeT, with its tokens sorted by kind: images, states, action queries.

    The policy samples its codes. The output here is the mean action over all codes, for the chunk
    that is executed: it depends on codes and offsets, and not on chance.
    """

    policy_types: ClassVar[tuple[str, ...]] = ("vqbet",)
    stack_names: ClassVar[tuple[str, ...]] = ("gpt",)
    default_stack: ClassVar[str] = "gpt"
    default_layers: ClassVar[tuple[int, ...]] = (-1,)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"image", "text", "action"})
    output_kind: ClassVar[OutputKind] = OutputKind.VECTORS

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        return {"gpt": LayerStack.of_modules(policy.vqbet.policy.transformer.h)}

    @override
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        return (*self.image_keys(policy, batch), OBS_STATE)

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        dtype: torch.dtype = policy.vqbet.policy.lm_head.weight.dtype
        return dtype

    @override
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        model = policy.vqbet
        images = torch.stack(camera_images(policy, batch), dim=-4)
        head = LayerStack((TapPoint(model.action_head, before=True),))
        stack = self.stack(policy, request.stack or self.default_stack)
        # The forward pass ends before the head, which draws codes at random.
        with (
            tap(head, (0,)) as queries,
            tap(stack, request.layers, stop=not request.output) as seen,
        ):
            model({**batch, OBS_IMAGES: images}, rollout=True)
        order, masks = _sorted_tokens(policy, batch[OBS_STATE])
        output = None
        if request.output:
            current = queries[0][:, policy.config.n_obs_steps - 1]
            actions = _mean_actions(model.action_head, current)
            everything = torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device)
            output = PolicyOutput(values=actions, mask=everything)
        hidden = {layer: states[:, order] for layer, states in seen.items()}
        return Features(hidden=hidden, masks=masks, output=output)


def _sorted_tokens(policy: Policy, state: Tensor) -> tuple[Tensor, TokenMasks]:
    """The positions of all images, then states, then action queries, and masks in that order.

    In the GPT they are interleaved, one group for each observed step; more queries follow.
    """
    rows, steps = state.shape[:2]
    cameras = policy.vqbet.num_images
    group = cameras + 2
    position = torch.arange(steps * group + policy.config.n_action_pred_token - 1)
    kind = torch.where(position < steps * group, position % group - cameras, 1).clamp(min=-1)
    order = torch.argsort(kind, stable=True).to(state.device)
    kind = kind.to(state.device)[order].expand(rows, -1)
    queries = int((kind[0] == 1).sum())
    span = (len(position) - queries, len(position))
    masks = TokenMasks(image=kind == -1, text=kind == 0, action=kind == 1, action_span=span)
    return order, masks


def _mean_actions(head: Any, features: Tensor) -> Tensor:
    """[B, chunk, action]: the mean of the actions that the head would sample for features [B, D].

    An action is the quantizer's decoding of a pair of codes plus one offset for each code.
    """
    chunk, codes = head.config.action_chunk_size, head.config.vqvae_n_embed
    chances = _code_chances(head, features)
    each = torch.arange(codes, device=features.device)
    with torch.no_grad():  # as in the policy's own forward
        latents = head.vqvae_model.get_embeddings_from_code(torch.cartesian_prod(each, each))
        decoded = head.vqvae_model.get_action_from_latent(latents)
    mean: Tensor = chances.flatten(1) @ decoded.flatten(1)
    offsets = head.map_to_cbet_preds_offset(features).unflatten(1, (2, codes, -1))
    marginals = torch.stack([chances.sum(2), chances.sum(1)], dim=1)
    mean = mean + torch.einsum("bgc,bgcw->bw", marginals, offsets)
    return mean.reshape(len(features), chunk, -1)


def _code_chances(head: Any, features: Tensor) -> Tensor:
    """[B, codes, codes]: the probability that the head samples each pair of codes."""
    codes, temperature = head.config.vqvae_n_embed, head.config.bet_softmax_temperature
    if not head.config.sequentially_select:
        logits = head.map_to_cbet_preds_bin(features).unflatten(1, (2, codes))
        first, second = torch.softmax(logits / temperature, dim=-1).unbind(1)
        return first.unsqueeze(2) * second.unsqueeze(1)
    first = torch.softmax(head.map_to_cbet_preds_primary_bin(features) / temperature, dim=-1)
    # The second code depends on the first: run the head for every first code.
    chosen = functional.one_hot(torch.arange(codes, device=features.device), codes)
    pairs = torch.cat(
        [
            features.unsqueeze(1).expand(-1, codes, -1),
            chosen.to(features.dtype).expand(len(features), -1, -1),
        ],
        dim=2,
    )
    second = torch.softmax(head.map_to_cbet_preds_secondary_bin(pairs) / temperature, dim=-1)
    return first.unsqueeze(2) * second
