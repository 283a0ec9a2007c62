"""xvla: Florence-2 over the first camera and language, then a transformer over all and actions."""

from collections.abc import Sequence
from typing import ClassVar, override

import torch
from lerobot.utils.constants import (
    ACTION,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
    OBS_STATE,
)
from torch import Tensor

from craftcli.choices import OutputKind, Pooling
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
from craftcli.policies.taps import tap
from craftcli.policies.tokens import ACTION_IS_PAD, counted_actions, nothing_padded

VLM = "vlm"
TRANSFORMER = "transformer"


class XvlaAdapter(PolicyAdapter):
    """Reads Florence-2's encoder, and the transformer that begins with the noisy actions."""

    policy_types: ClassVar[tuple[str, ...]] = ("xvla",)
    stack_names: ClassVar[tuple[str, ...]] = (VLM, TRANSFORMER)
    default_stack: ClassVar[str] = TRANSFORMER
    default_layers: ClassVar[tuple[int, ...]] = (-2, -1)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"image", "text", "action"})
    output_kind: ClassVar[OutputKind] = OutputKind.VECTORS
    loads_strictly: ClassVar[bool] = True
    reported_parts: ClassVar[tuple[str, ...]] = VISION_LANGUAGE_PARTS

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        model = policy.model
        return {
            VLM: LayerStack.of_modules(model.vlm.language_model.encoder.layers),
            TRANSFORMER: LayerStack.of_modules(model.transformer.blocks),
        }

    @override
    def tokens_of(self, stack: str) -> frozenset[str]:
        return self.token_kinds - ({"action"} if stack == VLM else frozenset())

    @override
    def pooling_of(self, stack: str) -> Pooling:
        return Pooling.VISION_TEXT if stack == VLM else self.default_pooling

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        dtype: torch.dtype = policy.model._get_target_dtype()
        return dtype

    @override
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        observed = (
            *self.image_keys(policy, batch),
            OBS_LANGUAGE_TOKENS,
            OBS_LANGUAGE_ATTENTION_MASK,
        )
        if not _over_actions(request):
            return observed
        optional = [policy.config.domain_feature_key or "domain_id"]
        optional += [OBS_STATE] if policy.config.use_proprio else []
        optional += [ACTION_IS_PAD] if request.output else []
        return (*observed, ACTION, NOISE, TIME, *(key for key in optional if key in batch))

    @override
    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        device = batch[OBS_LANGUAGE_TOKENS].device
        shape = (policy.config.chunk_size, policy.model.dim_action)
        generators = row_generators(seeds)
        time = torch.cat([torch.rand(1, generator=g) for g in generators]).to(device)
        completed = {**batch, NOISE: normal_rows(generators, shape).to(device), TIME: time}
        if own_actions:
            start = normal_rows(generators, shape).to(device)
            completed[ACTION] = _own_actions(policy, batch, start)
            completed[ACTION_IS_PAD] = nothing_padded(completed[ACTION])
        return completed

    @override
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        stack = request.stack or self.default_stack
        inputs = _inputs(policy, batch)
        output = None
        projector = LayerStack.of_modules([policy.model.vlm.multi_modal_projector])
        with (
            tap(projector, (0,), stop=False) as projected,
            tap(self.stack(policy, stack), request.layers, stop=not request.output) as hidden,
        ):
            encoded = _encode(policy, inputs)
            if _over_actions(request):
                predicted = _predict(policy, inputs, encoded, _noisy(policy, batch), batch[TIME])
                output = _output(policy, predicted, batch) if request.output else None
        masks = _masks(policy, batch, inputs["image_mask"], projected[0].shape[1], stack)
        return Features(hidden=hidden, masks=masks, output=output)


def _over_actions(request: FeatureRequest) -> bool:
    return request.output or request.stack != VLM


def _inputs(policy: Policy, batch: Batch) -> Batch:
    """The inputs of the model, in its precision."""
    inputs: Batch = policy._build_model_inputs(batch)
    dtype = policy.model._get_target_dtype()
    return {**inputs, **{name: inputs[name].to(dtype) for name in ("image_input", "proprio")}}


def _encode(policy: Policy, inputs: Batch) -> Batch:
    encoded: Batch = policy.model.forward_vlm(
        inputs["input_ids"], inputs["image_input"], inputs["image_mask"]
    )
    return encoded


def _predict(policy: Policy, inputs: Batch, encoded: Batch, noisy: Tensor, time: Tensor) -> Tensor:
    """The policy's estimate of the actions without noise."""
    model = policy.model
    proprio, noisy = model.action_space.preprocess(inputs["proprio"], noisy)
    actions: Tensor = model.transformer(
        domain_id=inputs["domain_id"],
        action_with_noise=noisy,
        proprio=proprio,
        t=time.to(noisy.dtype),
        **encoded,
    )
    return actions


def _noisy(policy: Policy, batch: Batch) -> Tensor:
    dtype = policy.model._get_target_dtype()
    actions = policy._prepare_action_targets(batch).to(dtype)
    time = batch[TIME].to(dtype).view(-1, 1, 1)
    noisy: Tensor = batch[NOISE].to(dtype) * time + actions * (1 - time)
    return noisy


@torch.no_grad()
def _own_actions(policy: Policy, batch: Batch, start: Tensor) -> Tensor:
    """The policy's `generate_actions`, from this noise; LeRobot's draws its own."""
    inputs = _inputs(policy, batch)
    encoded = _encode(policy, inputs)
    start = start.to(policy.model._get_target_dtype())
    actions = torch.zeros_like(start)
    steps = max(1, policy.config.num_denoising_steps)
    for step in range(steps, 0, -1):
        time = torch.full_like(start[:, 0, 0], step / steps)
        share = time.view(-1, 1, 1)
        noisy = start * share + actions * (1 - share)
        actions = _predict(policy, inputs, encoded, noisy, time)
    taken: Tensor = policy.model.action_space.postprocess(actions).float()
    return taken


def _output(policy: Policy, predicted: Tensor, batch: Batch) -> PolicyOutput:
    """The prediction, without the padding of the action dimensions."""
    values = predicted[:, :, : policy.config.action_feature.shape[0]].float()
    return PolicyOutput(values=values, mask=counted_actions(batch, values.shape[1], of=values))


def _masks(policy: Policy, batch: Batch, views: Tensor, per_view: int, stack: str) -> TokenMasks:
    """The tokens are actions, the first view, language, the other views, and soft prompts.

    Florence-2 (`vlm`) has only the first view and language. The policy attends to padded language
    too, but the masks leave it out: padding is never pooled.
    """
    first, *others = (view[:, None].expand(-1, per_view) for view in views.unbind(1))
    language = batch[OBS_LANGUAGE_ATTENTION_MASK].bool()
    if stack == VLM:
        return _segments([("image", first), ("text", language)])
    chunk, prompts = policy.config.chunk_size, policy.config.len_soft_prompts
    return _segments(
        [
            ("action", views.new_ones(len(views), chunk)),
            ("image", first),
            ("text", language),
            *(("image", other) for other in others),
            ("none", views.new_zeros(len(views), prompts)),
        ],
        action_span=(0, chunk),
    )


def _segments(
    segments: list[tuple[str, Tensor]], action_span: tuple[int, int] = (0, 0)
) -> TokenMasks:
    """One mask for each kind of token, True only in the segments of that kind."""
    masks = {
        kind: torch.cat([m if name == kind else torch.zeros_like(m) for name, m in segments], dim=1)
        for kind in ("image", "text", "action")
    }
    return TokenMasks(**masks, action_span=action_span)
