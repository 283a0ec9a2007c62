"""molmoact2: a Molmo over images and a prompt with the state in it, and an action expert beside it.

Each layer of the expert attends to the keys and values of the same layer of the language model. In
training, the language model also reads and predicts the actions as tokens behind the prompt. The
expert does not see these, and no token of the prompt does: anchors are prompts without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, override

import torch
from lerobot.utils.constants import ACTION
from torch import Tensor
from torch.nn import functional

from craftcli.choices import OutputKind, Pooling
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import (
    NOISE,
    TIME,
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
from craftcli.policies.tokens import action_masks, nothing_padded

VLM = "vlm"
EXPERT = "expert"
TEXT_LENGTH = 256
"""Tokens of a stored prompt beside its images: all rows of a cache need one length."""

_IDS, _MASK, _IS_IMAGE = "input_ids", "attention_mask", "token_type_ids"
_PROMPT = (_IDS, _MASK, _IS_IMAGE)
_PIXELS, _GRIDS = "pixel_values", "image_grids"
_IMAGES = (_PIXELS, "image_token_pooling", _GRIDS, "image_num_crops")
_STEP_IS_PAD, _NUMBER_IS_PAD = "action_horizon_is_pad", "action_dim_is_pad"
"""[B, chunk] and [B, numbers of an action], both bool."""


class MolmoAct2Adapter(PolicyAdapter):
    """Reads the language model, and the expert that takes the noise out of the actions."""

    policy_types: ClassVar[tuple[str, ...]] = ("molmoact2",)
    stack_names: ClassVar[tuple[str, ...]] = (VLM, EXPERT)
    default_stack: ClassVar[str] = EXPERT
    default_layers: ClassVar[tuple[int, ...]] = (-2, -1)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"image", "text", "action"})
    output_kind: ClassVar[OutputKind] = OutputKind.VECTORS
    reported_parts: ClassVar[tuple[str, ...]] = (
        "vision_backbone",
        "action_expert",
        "transformer",
        "lm_head",
    )

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        backbone = policy._backbone()
        found = {VLM: LayerStack.of_modules(backbone.transformer.blocks)}
        if _has_flow(policy):
            found[EXPERT] = LayerStack.of_modules(backbone.action_expert.blocks)
        return found

    @override
    def stack(self, policy: Policy, name: str) -> LayerStack:
        if name == EXPERT:
            _refuse_tokens(policy)
        return super().stack(policy, name)

    @override
    def tokens_of(self, stack: str) -> frozenset[str]:
        return frozenset({"image", "text"} if stack == VLM else {"action"})

    @override
    def pooling_of(self, stack: str) -> Pooling:
        return Pooling.VISION_TEXT if stack == VLM else self.default_pooling

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        dtype: torch.dtype = policy._backbone().transformer.ln_f.weight.dtype
        return dtype

    @override
    def enable_gradient_checkpointing(self, policy: Policy) -> None:
        policy._enable_gradient_checkpointing()

    @override
    def forget_old_weights(self, policy: Policy) -> None:
        # LeRobot keeps how time modulates the expert, and never computes it again.
        if _has_flow(policy):
            policy._backbone().action_expert._modulation_cache_key = None

    @override
    def image_keys(self, policy: Policy, batch: Batch) -> tuple[str, ...]:
        return (_PIXELS,) if _PIXELS in batch else ()

    @override
    def images(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        return {_PIXELS: _of_rows(batch, _PIXELS)}

    @override
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        observed = (*_IMAGES, *_PROMPT)
        if not _over_actions(request):
            return observed
        return (*observed, ACTION, _STEP_IS_PAD, _NUMBER_IS_PAD, NOISE, TIME)

    @override
    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        completed = {**batch, **_of_one_length(_prompts(policy, batch))}
        for key in _IMAGES:
            completed[key] = _of_rows(batch, key)
        if not _has_flow(policy):
            return completed
        device, generators = batch[_IDS].device, row_generators(seeds)
        shape = (policy.config.chunk_size, policy.config.expected_max_action_dim)
        completed[TIME] = torch.cat([_draw_time(policy, seed) for seed in seeds]).to(device)
        completed[NOISE] = normal_rows(generators, shape).to(device)
        if own_actions:
            start = normal_rows(generators, shape).to(device)
            completed[ACTION] = _own_actions(policy, completed, start)
            completed[_STEP_IS_PAD] = nothing_padded(start)
        return completed

    @override
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        stack, output = request.stack or self.default_stack, None
        points, stop = self.stack(policy, stack), may_stop(policy, request)
        prompts = _prompts(policy, batch)
        with tap(points, request.layers, stop=stop) as hidden:
            context = _encode(policy, batch, prompts)
            if _over_actions(request):
                _refuse_tokens(policy)
                time = batch[TIME].view(-1, 1, 1)
                noisy = (1 - time) * batch[NOISE] + time * batch[ACTION]
                predicted = _velocity(policy, context, batch, noisy, batch[TIME])
                output = _output(policy, batch, predicted) if request.output else None
        if stack == VLM:
            masks = _prompt_masks(policy, prompts)
        else:
            masks = action_masks(~batch[_STEP_IS_PAD])
        return Features(hidden=hidden, masks=masks, output=output)


def _over_actions(request: FeatureRequest) -> bool:
    return request.output or request.stack != VLM


def _has_flow(policy: Policy) -> bool:
    """Whether the policy trains its expert; else it acts by tokens alone."""
    mode: str = policy.config.action_mode
    return mode != "discrete"


def _refuse_tokens(policy: Policy) -> None:
    if not _has_flow(policy):
        raise CraftError(
            "The actions of this molmoact2 policy cannot be retained.",
            why="its action_mode is discrete: it acts by tokens, without its action expert.",
            fix="hold its language model: --stack vlm --mode hidden.",
            exit_code=EXIT_USAGE,
        )


def _of_rows(batch: Batch, key: str) -> Tensor:
    """[B, n, ...]: crops, patches or sizes of images by row; the preprocessor has all rows in one.

    A camera's images have one size in all rows, so that all rows have as many of each.
    """
    value: Tensor = batch[key]
    if batch[_GRIDS].dim() == 3:
        return value
    return value.reshape(len(batch[_IDS]), -1, *value.shape[1:])


def _prompts(policy: Policy, batch: Batch) -> Batch:
    """The prompts without the actions behind them, padded at their start to the longest of them."""
    ids, start = batch[_IDS], policy.model.config.action_start_token_id
    answered = (ids == (-1 if start is None else start)).cumsum(1) > 0
    valid = batch[_MASK].bool() & ~answered
    longest = int(valid.sum(1).max())
    # Stable, so that the tokens of a prompt keep their order.
    order = valid.int().argsort(dim=1, stable=True)[:, -longest:]
    valid = valid.gather(1, order)
    return {
        _IDS: torch.where(valid, ids.gather(1, order), 0),
        _MASK: valid.to(batch[_MASK].dtype),
        _IS_IMAGE: batch[_IS_IMAGE].gather(1, order) & valid,
    }


def _of_one_length(prompts: Batch) -> Batch:
    """Prompts that are padded at their start to the one length of all rows of a cache."""
    longest, images = prompts[_IDS].shape[1], int(prompts[_IS_IMAGE][0].sum())
    if longest > images + TEXT_LENGTH:
        raise CraftError(
            "An instruction is too long to be stored.",
            why=f"its prompt has {longest - images} tokens beside its images, and craft stores up "
            f"to {TEXT_LENGTH} for molmoact2.",
            fix="shorten the instruction (--prompts replaces those of a dataset).",
        )
    missing = images + TEXT_LENGTH - longest
    return {key: functional.pad(value, (missing, 0)) for key, value in prompts.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Context:
    """What the expert reads of the language model."""

    states: list[tuple[Tensor, Tensor]]
    """Keys and values [B, S, D] of each layer."""
    mask: Tensor
    """[B, S] bool: the tokens that the expert attends to."""


def _encode(policy: Policy, batch: Batch, prompts: Batch) -> _Context:
    """Run the language model over the prompts."""
    backbone = policy._backbone()
    images = {key: _of_rows(batch, key).flatten(0, 1) for key in _IMAGES}
    # The expert reads keys that are turned by their positions. LeRobot counts the padding too, so
    # that a row would depend on its neighbours; a policy that acts sees one prompt, without any.
    positions = (prompts[_MASK].cumsum(1) - 1).clamp(min=0)
    found = backbone(
        **policy._model_inputs({**prompts, **images, "position_ids": positions}),
        use_cache=False,
        collect_layer_kv_states=True,
    )
    sequence = backbone._cache_to_sequence
    return _Context(
        states=[(sequence(keys), sequence(values)) for keys, values in found.past_key_values],
        mask=policy._encoder_attention_mask_for_action_expert(
            input_ids=prompts[_IDS], attention_mask=prompts[_MASK]
        ),
    )


def _velocity(
    policy: Policy, context: _Context, batch: Batch, noisy: Tensor, time: Tensor
) -> Tensor:
    """What the expert predicts for noisy actions: the way from the noise to the actions."""
    expert = policy._backbone().action_expert
    dtype = expert.action_embed.weight.dtype
    predicted: Tensor = expert(
        _of_the_robot(policy, batch, noisy).to(dtype),
        time.to(dtype),
        encoder_kv_states=context.states,
        encoder_attention_mask=context.mask,
        action_attention_mask=~batch[_STEP_IS_PAD],
    )
    return predicted


def _of_the_robot(policy: Policy, batch: Batch, actions: Tensor) -> Tensor:
    """Actions with 0 for the numbers that the robot does not have, if the policy was trained so."""
    if not policy.config.mask_action_dim_padding:
        return actions
    return actions.masked_fill(batch[_NUMBER_IS_PAD].unsqueeze(1), 0)


def _draw_time(policy: Policy, seed: int) -> Tensor:
    """One time, as the policy's training draws them."""
    size = (1, policy.config.chunk_size, policy.config.expected_max_action_dim)
    # The policy's own function takes no generator, so torch's default one is seeded for it.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        _, times, _, _ = policy._prepare_flow_matching_tensors(
            actions=torch.zeros(size), action_dim_is_pad=None
        )
    first: Tensor = times[:, 0].float()
    return first


@torch.no_grad()
def _own_actions(policy: Policy, batch: Batch, start: Tensor) -> Tensor:
    """The chunk of `predict_action_chunk` from this noise, with the limits of its postprocessor."""
    steps = policy.config.num_inference_steps or policy.model.config.flow_matching_num_steps
    context = _encode(policy, batch, _prompts(policy, batch))
    whole = {**batch, _STEP_IS_PAD: nothing_padded(start)}
    actions = start
    for step in range(steps):
        time = torch.full_like(start[:, 0, 0], step / steps)
        actions = actions + _velocity(policy, context, whole, actions, time).float() / steps
    return _of_the_robot(policy, batch, actions).clamp(-1, 1)


def _output(policy: Policy, batch: Batch, predicted: Tensor) -> PolicyOutput:
    size = policy.config.output_features[ACTION].shape[0]
    return PolicyOutput(values=predicted[:, :, :size].float(), mask=~batch[_STEP_IS_PAD])


def _prompt_masks(policy: Policy, prompts: Batch) -> TokenMasks:
    valid = prompts[_MASK].bool()
    # Beside the patches of an image there are markers of its beginning, its rows and its end.
    patches = prompts[_IDS] == policy.model.config.image_patch_id
    return TokenMasks(image=valid & patches, text=valid & ~patches, action=torch.zeros_like(valid))
