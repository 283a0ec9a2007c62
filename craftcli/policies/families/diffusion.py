"""Diffusion policy: a 1D U-Net over the noisy action chunk, modulated by a condition vector."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, override

import torch
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_IMAGES, OBS_STATE
from torch import Tensor, nn

from craftcli.choices import OutputKind, Pooling
from craftcli.config.retention import DEFAULT_EPSILON
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
    TapPoint,
)
from craftcli.policies.cameras import camera_images
from craftcli.policies.seeded_noise import integer_rows, normal_rows, row_generators
from craftcli.policies.taps import may_stop, tap
from craftcli.policies.tokens import (
    ACTION_IS_PAD,
    action_masks,
    condition_masks,
    counted_actions,
    nothing_padded,
)

CONDITIONING = "conditioning"
_EPSILON = 0.001
"""A budget for errors of the predicted noise, most of whose variance is the noise itself. Measured
in examples/metaworld_forgetting."""


class DiffusionAdapter(PolicyAdapter):
    """Reads three parts of the U-Net and its condition vector.

    Each part has layers of one width and length. A position of the U-Net is a step of the action
    chunk; the `bottleneck` has fewer positions, and skip connections bypass it. `up` is the end of
    the U-Net at full length: everything that reaches the action passes it.
    """

    policy_types: ClassVar[tuple[str, ...]] = ("diffusion",)
    stack_names: ClassVar[tuple[str, ...]] = (CONDITIONING, "down", "bottleneck", "up")
    # Measured in examples/family_defaults (a tiny, weak teacher, one seed): with `up` held, actions
    # moved 8 times less than with nothing held; with `down` or `bottleneck`, at most 1.4 times.
    default_stack: ClassVar[str] = "up"
    default_layers: ClassVar[tuple[int, ...]] = (-1,)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"text", "action"})
    output_kind: ClassVar[OutputKind] = OutputKind.VECTORS
    # Each anchor has one noise and one time, and the gradient of few of them is mostly that draw.
    # Measured in examples/metaworld_forgetting (32 samples, 1500 steps, one seed, old and new
    # success): 4 anchors keep 0.78 and learn 0.52, 8 keep 0.86 and 0.54, 16 keep 0.92 and 0.64.
    samples_per_anchor: ClassVar[int] = 2
    # Of 512 frames with one draw each, these draws are learned by heart (L_ret 0.002 on them, 0.015
    # on others), and 0.80 is kept; 2048 frames keep 0.93, and 512 with four draws 0.92.
    draws_per_frame: ClassVar[int] = 4
    weighs_rows: ClassVar[bool] = True
    statistics_expectation: ClassVar[str | None] = (
        "In a Meta-World experiment this kept 0.92 of an old task of which a diffusion policy had "
        "0.96, with a learning rate of 3e-4 and 6000 steps; with 1e-3 and 1500 steps it kept 0.75, "
        "512 old frames 0.93, and plain fine-tuning 0.00 (three seeds). So take a small --lr and "
        "many --steps, or old frames: --old-dataset."
    )

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        unet = _unet(policy)
        first = unet.down_modules[0]
        # The last up-sampling returns to the full length; a U-Net of one level has none.
        ends = [level[-1] for level in unet.up_modules[-1:]]
        condition = TapPoint(first[0].cond_encoder, before=True)
        return {
            CONDITIONING: LayerStack((condition,)),
            "down": LayerStack.of_modules(first[:2]),
            "bottleneck": LayerStack.of_modules(unet.mid_modules),
            "up": LayerStack.of_modules([*ends, unet.final_conv[0]]),
        }

    @override
    def shard_units(self, policy: Policy) -> list[nn.Module]:
        unet = _unet(policy)
        levels = [*unet.down_modules, *unet.up_modules]
        return [*unet.mid_modules, *(part for level in levels for part in level)]

    @override
    def tokens_of(self, stack: str) -> frozenset[str]:
        return frozenset({"text" if stack == CONDITIONING else "action"})

    @override
    def pooling_of(self, stack: str) -> Pooling:
        return Pooling.LAST_TOKEN if stack == CONDITIONING else self.default_pooling

    @override
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        states = (OBS_STATE, OBS_ENV_STATE) if policy.config.env_state_feature else (OBS_STATE,)
        observed = (*self.image_keys(policy, batch), *states)
        if request.stack == CONDITIONING and not request.output:
            return observed
        padding = (ACTION_IS_PAD,) if policy.config.do_mask_loss_for_padding else ()
        return (*observed, ACTION, NOISE, TIME, *padding)

    @override
    def action_bound(self, policy: Policy) -> float | None:
        config = policy.config
        return config.clip_sample_range if config.clip_sample else None

    @override
    def enable_gradient_checkpointing(self, policy: Policy) -> None:
        # The U-Net reads the setting in every forward pass.
        policy.config.gradient_checkpointing = True
        # `is_recomputing` looks for this: the U-Net recomputes only in training mode, and so it
        # must stay in that mode for anchors too.
        _unet(policy).gradient_checkpointing = True

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        dtype: torch.dtype = _unet(policy).final_conv[-1].weight.dtype
        return dtype

    @override
    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        config, model = policy.config, policy.diffusion
        device = batch[OBS_STATE].device
        generators = row_generators(seeds)
        shape = (config.horizon, config.action_feature.shape[0])
        noise = normal_rows(generators, shape).to(device)
        levels = _acting_levels(model)
        time = levels[integer_rows(generators, len(levels))]
        drawn = {**batch, NOISE: noise, TIME: time.to(device)}
        if own_actions:
            with torch.no_grad():
                drawn[ACTION] = model.conditional_sample(
                    len(seeds),
                    global_cond=_condition(policy, batch),
                    generator=generators,
                    noise=normal_rows(generators, shape).to(device),
                )
            drawn[ACTION_IS_PAD] = nothing_padded(drawn[ACTION])
        return drawn

    @override
    def row_weights(self, policy: Policy, inputs: Mapping[str, Tensor]) -> Tensor | None:
        time = inputs.get(TIME)
        return None if time is None else _level_weights(policy.diffusion, time)

    @override
    def epsilon_of(self, stack: str) -> float:
        return DEFAULT_EPSILON if stack == CONDITIONING else _EPSILON

    @override
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        condition = _condition(policy, batch)
        if request.stack == CONDITIONING and not request.output:
            return _condition_features(condition, request)
        scheduler = policy.diffusion.noise_scheduler
        noisy = scheduler.add_noise(batch[ACTION], batch[NOISE], batch[TIME])
        counted = counted_actions(
            batch, noisy.shape[1], of=noisy, padding=policy.config.do_mask_loss_for_padding
        )
        stack = self.stack(policy, request.stack or self.default_stack)
        output = None
        with tap(stack, request.layers, stop=may_stop(policy, request)) as seen:
            predicted = _unet(policy)(noisy, batch[TIME], global_cond=condition)
            if request.output:
                output = PolicyOutput(values=predicted, mask=counted)
        if request.stack == CONDITIONING:
            return _condition_features(condition, request, output)
        # Convolutions have channels before positions.
        hidden = {layer: states.transpose(1, 2) for layer, states in seen.items()}
        length = next((states.shape[1] for states in hidden.values()), noisy.shape[1])
        # A position after k strided convolutions is centred on every 2^k-th step.
        masks = action_masks(counted[:, :: noisy.shape[1] // length])
        return Features(hidden=hidden, masks=masks, output=output)


def _unet(policy: Policy) -> Any:
    """The U-Net before compilation: a compiled forward pass cannot be stopped early."""
    unet = policy.diffusion.unet
    return getattr(unet, "_orig_mod", unet)


def _acting_levels(model: Any) -> Tensor:
    """The levels of noise that the policy meets when it acts; it answers at no others."""
    scheduler = model.noise_scheduler
    scheduler.set_timesteps(model.num_inference_steps)
    # From little noise to much.
    levels: Tensor = scheduler.timesteps.flip(0).cpu()
    return levels


def _level_weights(model: Any, time: Tensor) -> Tensor:
    """[B]: what an error at the levels of noise `time` [B] means for the action.

    The policy sees √ᾱ action + √(1 - ᾱ) noise. An error e of the noise that it predicts is an error
    e √((1 - ᾱ) / ᾱ) of the action: next to nothing at the lowest levels, which yet have most of the
    errors. So an error counts w = min(1, (1 - ᾱ) / ᾱ); one of a predicted action, from the other
    side, min(1, ᾱ / (1 - ᾱ)). Weights are then divided by their mean over the levels of acting.
    (Min-SNR weighting: Hang et al. 2023, arXiv 2303.09556.)
    """
    scheduler = model.noise_scheduler
    signal = scheduler.alphas_cumprod
    ratio = (1 - signal) / signal
    predicts_noise = scheduler.config.prediction_type == "epsilon"
    weights = (ratio if predicts_noise else 1 / ratio).clamp(max=1)
    weights = weights / weights[_acting_levels(model)].mean()
    found: Tensor = weights.to(time.device)[time.long()]
    return found


def _condition(policy: Policy, batch: Batch) -> Tensor:
    """[B, D]: the vector through which the U-Net sees the observations."""
    observed = dict(batch)
    if policy.config.image_features:
        images = camera_images(policy, batch)
        # A single frame may lack the time axis.
        images = [image.unsqueeze(1) if image.ndim == 4 else image for image in images]
        observed[OBS_IMAGES] = torch.stack(images, dim=-4)
    condition: Tensor = policy.diffusion._prepare_global_conditioning(observed)
    return condition


def _condition_features(
    condition: Tensor, request: FeatureRequest, output: PolicyOutput | None = None
) -> Features:
    hidden = {layer: condition.unsqueeze(1) for layer in request.layers}
    return Features(hidden=hidden, masks=condition_masks(condition), output=output)
