"""Multi-task DiT: a diffusion transformer over noisy actions, modulated by a condition vector."""

from collections.abc import Sequence
from typing import ClassVar, override

import torch
from lerobot.utils.constants import (
    ACTION,
    OBS_IMAGES,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
    OBS_STATE,
)
from torch import Tensor

from craftcli.choices import OutputKind, Pooling
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
from craftcli.policies.taps import tap
from craftcli.policies.tokens import (
    ACTION_IS_PAD,
    action_masks,
    condition_masks,
    counted_actions,
    nothing_padded,
)

CONDITIONING = "conditioning"


class MultiTaskDitAdapter(PolicyAdapter):
    """Reads the transformer, where a token is a step of the action chunk, and its condition."""

    policy_types: ClassVar[tuple[str, ...]] = ("multi_task_dit",)
    stack_names: ClassVar[tuple[str, ...]] = (CONDITIONING, "transformer")
    # Measured in examples/family_defaults (a tiny, weak teacher, one seed): compared with nothing
    # held, actions moved 18 times less; with pooled tokens 5 times, with the condition 1.3 times.
    default_stack: ClassVar[str] = "transformer"
    default_layers: ClassVar[tuple[int, ...]] = (-1,)
    default_pooling: ClassVar[Pooling] = Pooling.ACTION_TOKENS
    token_kinds: ClassVar[frozenset[str]] = frozenset({"text", "action"})
    output_kind: ClassVar[OutputKind] = OutputKind.VECTORS

    @override
    def stacks(self, policy: Policy) -> dict[str, LayerStack]:
        blocks = policy.noise_predictor.transformer_blocks
        condition = TapPoint(blocks[0].adaLN_modulation, before=True)
        return {
            CONDITIONING: LayerStack((condition,)),
            "transformer": LayerStack.of_modules(blocks),
        }

    @override
    def tokens_of(self, stack: str) -> frozenset[str]:
        return frozenset({"text" if stack == CONDITIONING else "action"})

    @override
    def pooling_of(self, stack: str) -> Pooling:
        return Pooling.LAST_TOKEN if stack == CONDITIONING else self.default_pooling

    @override
    def input_keys(self, policy: Policy, batch: Batch, request: FeatureRequest) -> tuple[str, ...]:
        language = (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)
        observed = (*self.image_keys(policy, batch), OBS_STATE, *language)
        if request.stack == CONDITIONING and not request.output:
            return observed
        padding = (ACTION_IS_PAD,) if policy.config.do_mask_loss_for_padding else ()
        return (*observed, ACTION, NOISE, TIME, *padding)

    @override
    def action_bound(self, policy: Policy) -> float | None:
        config = policy.config
        return config.clip_sample_range if config.is_diffusion and config.clip_sample else None

    @override
    def compute_dtype(self, policy: Policy) -> torch.dtype:
        dtype: torch.dtype = policy.noise_predictor.output_proj.weight.dtype
        return dtype

    @override
    def anchor_inputs(
        self, policy: Policy, batch: Batch, *, seeds: Sequence[int], own_actions: bool
    ) -> Batch:
        config, device = policy.config, batch[OBS_STATE].device
        generators = row_generators(seeds)
        shape = (config.horizon, config.action_feature.shape[0])
        noise = normal_rows(generators, shape).to(device)
        time = _times(policy, generators).to(device)
        drawn = {**batch, NOISE: noise, TIME: time}
        if own_actions:
            start = normal_rows(generators, shape).to(device)
            drawn[ACTION] = _own_actions(policy, _condition(policy, batch), start, generators)
            drawn[ACTION_IS_PAD] = nothing_padded(drawn[ACTION])
        return drawn

    @override
    def features(self, policy: Policy, batch: Batch, request: FeatureRequest) -> Features:
        condition = _condition(policy, batch)
        of_condition = request.stack == CONDITIONING
        if of_condition and not request.output:
            return _condition_features(condition, request)
        noisy = _noisy(policy, batch)
        counted = counted_actions(
            batch, noisy.shape[1], of=noisy, padding=policy.config.do_mask_loss_for_padding
        )
        stack = self.stack(policy, request.stack or self.default_stack)
        output = None
        with tap(stack, request.layers, stop=not request.output) as hidden:
            predicted = policy.noise_predictor(noisy, batch[TIME], conditioning_vec=condition)
            output = PolicyOutput(values=predicted, mask=counted)
        if of_condition:
            return _condition_features(condition, request, output)
        return Features(hidden=hidden, masks=action_masks(counted), output=output)


def _condition(policy: Policy, batch: Batch) -> Tensor:
    """[B, D]: the vector through which the transformer sees the observations and the task."""
    images = camera_images(policy, batch)
    observed = {**batch, OBS_IMAGES: torch.stack(images, dim=-4)} if images else batch
    condition: Tensor = policy.observation_encoder.encode(observed)
    return condition


def _condition_features(
    condition: Tensor, request: FeatureRequest, output: PolicyOutput | None = None
) -> Features:
    hidden = {layer: condition.unsqueeze(1) for layer in request.layers}
    return Features(hidden=hidden, masks=condition_masks(condition), output=output)


def _times(policy: Policy, generators: Sequence[torch.Generator]) -> Tensor:
    """One time for each row [B], distributed as in the policy's training."""
    if policy.config.is_diffusion:
        steps = policy.objective.noise_scheduler.config.num_train_timesteps
        return integer_rows(generators, steps)
    times = []
    # The policy's own function takes no generator, so torch's default one is seeded for it.
    with torch.random.fork_rng(devices=[]):
        for seed in integer_rows(generators, 2**32).tolist():
            torch.default_generator.manual_seed(seed)
            times.append(policy.objective._sample_timesteps(1, torch.device("cpu")))
    return torch.cat(times)


def _noisy(policy: Policy, batch: Batch) -> Tensor:
    """Actions and noise, mixed as in the policy's training."""
    actions, noise, time = batch[ACTION], batch[NOISE], batch[TIME]
    mixed: Tensor
    if policy.config.is_diffusion:
        mixed = policy.objective.noise_scheduler.add_noise(actions, noise, time)
    else:
        time = time.view(-1, 1, 1)
        mixed = time * actions + (1 - (1 - policy.config.sigma_min) * time) * noise
    return mixed


@torch.no_grad()
def _own_actions(
    policy: Policy, condition: Tensor, start: Tensor, generators: list[torch.Generator]
) -> Tensor:
    """Sample actions from this noise as the policy does; its own sampler takes no generator."""
    config, objective, model = policy.config, policy.objective, policy.noise_predictor
    if config.is_flow_matching:
        grid = torch.linspace(0, 1, config.num_integration_steps + 1, device=start.device)
        euler = config.integration_method == "euler"
        integrate = objective._euler_integrate if euler else objective._rk4_integrate
        flowed: Tensor = integrate(model, start, grid, condition)
        return flowed
    scheduler, sample = objective.noise_scheduler, start
    scheduler.set_timesteps(objective.num_inference_steps)
    for step in scheduler.timesteps:
        time = torch.full((len(sample),), step, dtype=torch.long, device=sample.device)
        predicted = model(sample, time, conditioning_vec=condition)
        sample = scheduler.step(predicted, step, sample, generator=generators).prev_sample
    return sample
