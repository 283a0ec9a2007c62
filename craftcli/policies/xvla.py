"""xvla: Florence-2 over the first camera and language, then a transformer over all with actions."""

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

from craftcli.cache.pooling import TokenMasks
from craftcli.choices import OutputKind, Pooling
from craftcli.policies.base import (
    NOISE,
    TIME,
    Batch,
    Features,
    LayerStack,
    Output,
    Policy,
    PolicyAdapter,
    Wanted,
)
from craftcli.policies.draws import normal_rows, row_generators
from craftcli.policies.taps import tap
from craftcli.policies.tokens import ACTION_IS_PAD, counted_actions, nothing_padded

VLM = "vlm"
TRANSFORMER = "transformer"


class XvlaAdapter(PolicyAdapter):
    """Taps Florence-2's encoder and the transformer whose first tokens are the noisy actions."""

    policy_types: ClassVar[tuple[str, ...]] = ("xvla",)
    stack_names: ClassVar[tuple[str, ...]] = (VLM, TRANSFORMER)
    default_stack: ClassVar[str] = TRANSFORMER
    default_layers: ClassVar[tuple[int, ...]] = (-2, -1)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"image", "text", "action"})
    output_kind: ClassVar[OutputKind] = OutputKind.VECTORS
    loads_strictly: ClassVar[bool] = True

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
    def input_keys(self, policy: Policy, batch: Batch, wanted: Wanted) -> tuple[str, ...]:
        observed = (
            *self.image_keys(policy, batch),
            OBS_LANGUAGE_TOKENS,
            OBS_LANGUAGE_ATTENTION_MASK,
        )
        if not _over_actions(wanted):
            return observed
        maybe = [policy.config.domain_feature_key or "domain_id"]
        maybe += [OBS_STATE] if policy.config.use_proprio else []
        maybe += [ACTION_IS_PAD] if wanted.output else []
        return (*observed, ACTION, NOISE, TIME, *(key for key in maybe if key in batch))

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
    def features(self, policy: Policy, batch: Batch, wanted: Wanted) -> Features:
        stack = wanted.stack or self.default_stack
        inputs = _inputs(policy, batch)
        output = None
        projector = LayerStack.of_modules([policy.model.vlm.multi_modal_projector])
        with (
            tap(projector, (0,), stop=False) as projected,
            tap(self.stack(policy, stack), wanted.layers, stop=not wanted.output) as hidden,
        ):
            encoded = _encode(policy, inputs)
            if _over_actions(wanted):
                predicted = _predict(policy, inputs, encoded, _noisy(policy, batch), batch[TIME])
                output = _output(policy, predicted, batch) if wanted.output else None
        masks = _masks(policy, batch, inputs["image_mask"], projected[0].shape[1], stack)
        return Features(hidden=hidden, masks=masks, output=output)


def _over_actions(wanted: Wanted) -> bool:
    return wanted.output or wanted.stack != VLM


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
    """The actions that the policy sees behind the noise."""
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
    """What `generate_actions` of the policy gives from this noise; it draws its own."""
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


def _output(policy: Policy, predicted: Tensor, batch: Batch) -> Output:
    """The prediction, without the dimensions that fill up."""
    values = predicted[:, :, : policy.config.action_feature.shape[0]].float()
    return Output(values=values, mask=counted_actions(batch, values.shape[1], of=values))


def _masks(policy: Policy, batch: Batch, views: Tensor, per_view: int, stack: str) -> TokenMasks:
    """First view and language, with actions before and other views and soft prompts behind.

    The policy attends to padded language too; as a token to be pooled it does not count.
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
    """One mask a kind, True only in the segments of that kind."""
    masks = {
        kind: torch.cat([m if name == kind else torch.zeros_like(m) for name, m in segments], dim=1)
        for kind in ("image", "text", "action")
    }
    return TokenMasks(**masks, action_span=action_span)
