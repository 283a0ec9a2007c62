"""groot (GR00T N1.7): Qwen3-VL over images and language, then a transformer over noisy actions.

Between the two, LeRobot's action head attends to the padding of prompts as well, so that a row of a
batch depends on the longest prompt in it. When the policy acts it sees one prompt, without padding.
Here rows of one length run together, and none is padded.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, override

import torch
from lerobot.utils.constants import ACTION
from torch import Tensor
from torch.nn import functional

from craftcli.choices import OutputKind, Pooling
from craftcli.errors import CraftError
from craftcli.policies.base import (
    NOISE,
    TIME,
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
from craftcli.policies.seeded_noise import normal_rows, row_generators
from craftcli.policies.taps import may_stop, tap
from craftcli.policies.tokens import ACTION_IS_PAD, counted_actions

VLM = "vlm"
EXPERT = "expert"
TEXT_LENGTH = 192
"""Tokens of a stored prompt beside its images: all rows of a cache need one length."""

_IDS, _MASK = "input_ids", "attention_mask"
_PIXELS, _GRIDS = "pixel_values", "image_grid_thw"
_STATE, _EMBODIMENT = "state", "embodiment_id"
_COUNTED = "action_mask"
"""[B, horizon, dim], or [B, horizon] without actions: 1 for the numbers that the loss counts."""


class GrootAdapter(PolicyAdapter):
    """Reads the language model, and the transformer that takes the noise out of the actions."""

    policy_types: ClassVar[tuple[str, ...]] = ("groot",)
    stack_names: ClassVar[tuple[str, ...]] = (VLM, EXPERT)
    default_stack: ClassVar[str] = EXPERT
    default_layers: ClassVar[tuple[int, ...]] = (-2, -1)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"image", "text", "action"})
    output_kind: ClassVar[OutputKind] = OutputKind.VECTORS
    reported_parts: ClassVar[tuple[str, ...]] = ("visual", *VISION_LANGUAGE_PARTS, "action_head")

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        model = policy._groot_model
        return {
            VLM: LayerStack.of_modules(model.backbone.language_model.layers),
            EXPERT: LayerStack.of_modules(model.action_head.model.transformer_blocks),
        }

    @override
    def tokens_of(self, stack: str) -> frozenset[str]:
        return frozenset({"image", "text"} if stack == VLM else {"text", "action"})

    @override
    def pooling_of(self, stack: str) -> Pooling:
        return Pooling.VISION_TEXT if stack == VLM else self.default_pooling

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        dtype: torch.dtype = policy._groot_model.dtype
        return torch.bfloat16 if policy.config.use_bf16 else dtype

    @override
    def image_keys(self, policy: Policy, batch: Batch) -> tuple[str, ...]:
        return (_PIXELS,) if _PIXELS in batch else ()

    @override
    def images(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        return {_PIXELS: _of_rows(batch, _PIXELS)}

    @override
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        observed = (*self.image_keys(policy, batch), _GRIDS, _IDS, _MASK)
        if not _over_actions(request):
            return observed
        padding = (ACTION_IS_PAD,) if request.output and ACTION_IS_PAD in batch else ()
        return (*observed, _STATE, _EMBODIMENT, ACTION, NOISE, TIME, *padding)

    @override
    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        head, device = policy._groot_model.action_head, batch[_IDS].device
        horizon = batch[_COUNTED].shape[1]
        time = torch.cat([_draw_time(head, seed) for seed in seeds]).to(device)
        generators = row_generators(seeds)
        noise = normal_rows(generators, (horizon, head.action_dim)).to(device)
        completed = {**batch, **_of_one_length(policy, batch), NOISE: noise, TIME: time}
        for key in (_PIXELS, _GRIDS):
            completed[key] = _of_rows(batch, key)
        if own_actions:
            start = normal_rows(generators, (head.action_horizon, head.action_dim)).to(device)
            completed |= _own_actions(policy, batch, start, horizon)
        elif batch[_COUNTED].dim() == 3:
            completed[ACTION_IS_PAD] = ~batch[_COUNTED].bool().any(-1)
        return completed

    @override
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        stack = request.stack or self.default_stack
        points, stop = self.stack(policy, stack), may_stop(policy, request)
        order, hidden, outputs = [], [], []
        for rows, part in _equal_lengths(policy, batch):
            predicted = None
            with (
                _autocast(policy),
                tap(points, request.layers, stop=stop) as seen,
            ):
                encoded = _encode(policy, part)
                if _over_actions(request):
                    encoded = _to_action_head(policy, encoded)
                    share = part[TIME].view(-1, 1, 1)
                    noisy = (1 - share) * part[NOISE] + share * part[ACTION]
                    steps = (part[TIME] * _buckets(policy)).long()
                    predicted = _velocity(policy, encoded, part, noisy, steps)
            order.append(rows)
            hidden.append(seen)
            outputs.append(predicted)
        back = torch.cat(order).argsort()
        masks = _masks(policy, batch, stack)
        length = masks.text.shape[1]
        return Features(
            hidden={
                layer: _joined([_at_the_end(seen[layer], length) for seen in hidden], back)
                for layer in request.layers
            },
            masks=masks,
            output=_output(policy, batch, _joined(outputs, back)) if request.output else None,
        )


def _over_actions(request: FeatureRequest) -> bool:
    return request.output or request.stack != VLM


def _autocast(policy: Policy) -> Any:
    """The precision of the policy's own forward pass, or the one around it."""
    if not policy.config.use_bf16:
        return nullcontext()
    return torch.autocast(policy._groot_model.device.type, dtype=torch.bfloat16)


def _of_rows(batch: Batch, key: str) -> Tensor:
    """[B, n, d]: patches or sizes of images by row; the preprocessor has those of all rows in one.

    All images have one size, because the preprocessor resizes them.
    """
    value: Tensor = batch[key]
    return value if value.dim() == 3 else value.reshape(len(batch[_IDS]), -1, value.shape[-1])


def _of_one_length(policy: Policy, batch: Batch) -> Batch:
    """Prompts that are padded at their start to the one length of all rows of a cache."""
    ids, mask = batch[_IDS], batch[_MASK]
    images = int((ids[0] == policy._groot_model.backbone.model.config.image_token_id).sum())
    longest = int(mask.sum(1).max())
    if longest > images + TEXT_LENGTH:
        raise CraftError(
            "An instruction is too long to be stored.",
            why=f"its prompt has {longest - images} tokens beside its images, and craft stores up "
            f"to {TEXT_LENGTH} for groot.",
            fix="shorten the instruction (--prompts replaces those of a dataset).",
        )
    # Padding of the batch that is longer than all of its prompts is cut off.
    missing = images + TEXT_LENGTH - longest
    return {
        _IDS: functional.pad(ids[:, -longest:], (missing, 0)),
        _MASK: functional.pad(mask[:, -longest:], (missing, 0)),
    }


def _equal_lengths(policy: Policy, batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
    """Rows whose prompts have one length, and their inputs without padding, as the model takes."""
    lengths = batch[_MASK].sum(1)
    dtype = policy._groot_model.dtype
    read = (_STATE, _EMBODIMENT, ACTION, NOISE, TIME)
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero().flatten()
        part = {key: batch[key][rows] for key in read if key in batch}
        part |= {key: batch[key][rows, -length:] for key in (_IDS, _MASK)}
        part |= {key: _of_rows(batch, key)[rows].flatten(0, 1) for key in (_PIXELS, _GRIDS)}
        yield rows, {k: v.to(dtype) if v.is_floating_point() else v for k, v in part.items()}


def _joined(parts: Sequence[Any], back: Tensor) -> Tensor:
    # One part has all rows in their order already.
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))[back]


def _at_the_end(states: Tensor, length: int) -> Tensor:
    """States with the padding before them that was left out."""
    return functional.pad(states, (0, 0, length - states.shape[1], 0))


def _encode(policy: Policy, part: Batch) -> Any:
    backbone = policy._groot_model.backbone
    return backbone(backbone.prepare_input(part))


def _to_action_head(policy: Policy, encoded: Any) -> Any:
    return policy._groot_model.action_head.process_backbone_output(encoded)


def _velocity(policy: Policy, encoded: Any, part: Batch, noisy: Tensor, steps: Tensor) -> Tensor:
    """What the action head predicts for noisy actions: the way from the noise to the actions."""
    head = policy._groot_model.action_head
    actions = head.action_encoder(noisy, steps, part[_EMBODIMENT])
    if head.config.add_pos_embed:
        positions = torch.arange(actions.shape[1], device=actions.device)
        actions = actions + head.position_embedding(positions).unsqueeze(0)
    state = head.state_encoder(part[_STATE].flatten(1).unsqueeze(1), part[_EMBODIMENT])
    masks = {}
    if head.config.use_alternate_vl_dit:
        masks["image_mask"] = encoded.image_mask
        masks["backbone_attention_mask"] = encoded.backbone_attention_mask
    states = head.model(
        hidden_states=torch.cat((state, actions), dim=1),
        encoder_hidden_states=encoded.backbone_features,
        timestep=steps,
        **masks,
    )
    predicted: Tensor = head.action_decoder(states, part[_EMBODIMENT])
    return predicted[:, -noisy.shape[1] :]


def _buckets(policy: Policy) -> int:
    """The number of time steps between noise and actions."""
    buckets: int = policy._groot_model.action_head.num_timestep_buckets
    return buckets


def _draw_time(head: Any, seed: int) -> Tensor:
    # The head's own function takes no generator, so torch's default one is seeded for it.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        time: Tensor = head.sample_time(1, torch.device("cpu"), torch.float32)
    return time


@torch.no_grad()
def _own_actions(policy: Policy, batch: Batch, start: Tensor, horizon: int) -> Batch:
    """The actions of the policy's `get_action` from this noise, padded as its preprocessor does."""
    steps = policy._groot_model.action_head.num_inference_timesteps
    order, chunks = [], []
    for rows, part in _equal_lengths(policy, {**batch, NOISE: start}):
        actions = part[NOISE]
        with _autocast(policy):
            encoded = _to_action_head(policy, _encode(policy, part))
            for step in range(steps):
                time = int(step / steps * _buckets(policy))
                times = torch.full(actions.shape[:1], time, device=actions.device)
                actions = actions + _velocity(policy, encoded, part, actions, times) / steps
        order.append(rows)
        chunks.append(actions.float())
    actions = _joined(chunks, torch.cat(order).argsort())
    told = min(policy._resolve_prediction_horizon(actions), horizon)
    kept = torch.zeros_like(actions[:, :horizon])
    kept[:, :told, : _size(policy)] = actions[:, :told, : _size(policy)]
    beyond = torch.arange(horizon, device=kept.device) >= told
    return {ACTION: kept, ACTION_IS_PAD: beyond.expand(len(kept), -1).clone()}


def _size(policy: Policy) -> int:
    """Numbers of an action, without the padding."""
    size: int = policy.config.output_features[ACTION].shape[0]
    return size


def _output(policy: Policy, batch: Batch, predicted: Tensor) -> PolicyOutput:
    values = predicted[:, :, : _size(policy)].float()
    return PolicyOutput(values=values, mask=counted_actions(batch, values.shape[1], of=values))


def _masks(policy: Policy, batch: Batch, stack: str) -> TokenMasks:
    """Of the prompt with its images, or of the state (as text) and the actions after it."""
    if stack == VLM:
        there = batch[_MASK].bool()
        image = there & (batch[_IDS] == policy._groot_model.backbone.model.config.image_token_id)
        return TokenMasks(image=image, text=there & ~image, action=torch.zeros_like(there))
    rows, horizon = batch[ACTION].shape[:2]
    action = torch.ones(rows, 1 + horizon, dtype=torch.bool, device=batch[ACTION].device)
    action[:, 0] = False
    return TokenMasks(
        image=torch.zeros_like(action), text=~action, action=action, action_span=(1, 1 + horizon)
    )
