"""Diffusion: the adapter reads U-Nets of every shape, and their own loss follows from it."""

from typing import Any

import pytest
import torch
from tiny import diffusion
from tiny.family import SEED
from tiny.world import ACTIONS, CAMERAS, ENV, PX, STATE
from torch.nn import functional

from craftcli.choices import Pooling
from craftcli.config.retention import DEFAULT_EPSILON
from craftcli.policies.base import NOISE, TIME, FeatureRequest, Features
from craftcli.policies.families.diffusion import DiffusionAdapter
from craftcli.policies.pooling import pool
from craftcli.policies.seeded_noise import integer_rows, normal_rows, row_generators

ADAPTER = DiffusionAdapter()
ROWS, SEEDS = 3, [1, 2, 3]


def batch(*, cameras: int = 0) -> dict[str, Any]:
    torch.manual_seed(1)
    inputs = {camera: torch.rand(ROWS, 2, 3, PX, PX) for camera in CAMERAS[:cameras]}
    padding = torch.zeros(ROWS, diffusion.HORIZON, dtype=torch.bool)
    padding[0, 5:] = padding[2, -1:] = True
    return {
        **inputs,
        "observation.state": torch.randn(ROWS, 2, STATE),
        "observation.environment_state": torch.randn(ROWS, 2, ENV),
        "action": torch.randn(ROWS, diffusion.HORIZON, ACTIONS),
        "action_is_pad": padding,
    }


def features(policy: Any, inputs: dict[str, Any], stack: str) -> Features:
    layers = tuple(range(len(ADAPTER.stack(policy, stack))))
    with torch.no_grad():
        return ADAPTER.features(
            policy.eval(), inputs, FeatureRequest(stack=stack, layers=layers, output=True)
        )


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        pytest.param({}, (8, 4, 8), id="two levels"),
        pytest.param({"down_dims": (16,)}, (8, 8, 8), id="one level"),
        pytest.param({"down_dims": (16, 24, 32)}, (8, 2, 8), id="three levels"),
        pytest.param({"prediction_type": "sample"}, (8, 4, 8), id="sample"),
        pytest.param({"do_mask_loss_for_padding": True}, (8, 4, 8), id="masked"),
        pytest.param({"gradient_checkpointing": True}, (8, 4, 8), id="checkpointing"),
        pytest.param(
            {"cameras": 2, "use_separate_rgb_encoder_per_camera": True}, (8, 4, 8), id="encoders"
        ),
    ],
)
def test_the_prediction_gives_the_policys_own_loss(
    settings: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    policy = diffusion.policy(**{"cameras": 0, **settings}).eval()
    seen = batch(cameras=settings.get("cameras", 0))
    seen |= diffusion.DIFFUSION.draw(policy, seen)
    torch.manual_seed(SEED)
    with torch.no_grad():
        expected, _ = policy(seen)
    target = seen["action"] if policy.config.prediction_type == "sample" else seen[NOISE]
    for stack, length in zip(("down", "bottleneck", "up"), lengths, strict=True):
        found = features(policy, seen, stack)
        assert {states.shape[1] for states in found.hidden.values()} == {length}
        assert found.output is not None
        kept = found.output.mask
        loss = functional.mse_loss(found.output.values[kept], target[kept])
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("masked", [False, True])
def test_padded_actions_count_where_the_policys_loss_counts_them(masked: bool) -> None:
    policy = diffusion.policy(cameras=0, do_mask_loss_for_padding=masked)
    seen = ADAPTER.anchor_inputs(policy, batch(), seeds=SEEDS, own_actions=False)
    full = ~seen["action_is_pad"] if masked else torch.ones(ROWS, 8, dtype=torch.bool)
    assert torch.equal(features(policy, seen, "up").masks.action, full)
    assert torch.equal(features(policy, seen, "bottleneck").masks.action, full[:, ::2])
    request = FeatureRequest(stack="up", layers=(0,))
    assert ("action_is_pad" in ADAPTER.input_keys(policy, seen, request)) == masked
    own = ADAPTER.anchor_inputs(policy.eval(), batch(), seeds=SEEDS, own_actions=True)
    assert features(policy, own, "up").masks.action.all()


@pytest.mark.parametrize("scheduler", ["DDPM", "DDIM"])
def test_own_actions_are_what_the_policy_samples(scheduler: str) -> None:
    policy = diffusion.policy(cameras=0, noise_scheduler_type=scheduler).eval()
    seen = batch()
    own = ADAPTER.anchor_inputs(policy, seen, seeds=SEEDS, own_actions=True)
    generators = row_generators(SEEDS)
    shape = (diffusion.HORIZON, ACTIONS)
    assert torch.equal(own[NOISE], normal_rows(generators, shape))
    assert torch.equal(own[TIME], integer_rows(generators, diffusion.STEPS))
    start = normal_rows(generators, shape)
    observed = [seen["observation.state"], seen["observation.environment_state"]]
    condition = torch.cat(observed, dim=-1).flatten(1)
    for row in range(ROWS):
        with torch.no_grad():
            sampled = policy.diffusion.conditional_sample(
                1,
                global_cond=condition[row : row + 1],
                generator=generators[row],
                noise=start[row : row + 1],
            )
        torch.testing.assert_close(own["action"][row : row + 1], sampled, rtol=1e-4, atol=1e-5)


def test_anchors_have_the_levels_of_noise_that_the_policy_meets_when_it_acts() -> None:
    policy = diffusion.policy(cameras=0, noise_scheduler_type="DDIM", num_inference_steps=2).eval()
    seen: list[int] = []
    policy.diffusion.unet.register_forward_pre_hook(lambda _, given: seen.append(int(given[1][0])))
    rows = {name: values[:1].repeat_interleave(40, 0) for name, values in batch().items()}
    drawn = ADAPTER.anchor_inputs(policy, rows, seeds=range(40), own_actions=True)[TIME]
    assert set(drawn.tolist()) == set(seen)
    assert len(set(seen)) == 2 < diffusion.STEPS


@pytest.mark.parametrize("predicted", ["epsilon", "sample"])
def test_an_error_counts_by_what_it_means_for_the_action(predicted: str) -> None:
    """Min-SNR weights with γ = 1, divided by their mean over the levels of acting."""
    policy = diffusion.policy(
        cameras=0,
        noise_scheduler_type="DDIM",
        num_inference_steps=4,
        num_train_timesteps=12,
        prediction_type=predicted,
    )
    signal = policy.diffusion.noise_scheduler.alphas_cumprod
    snr = signal / (1 - signal)
    by_hand = snr.clamp(max=1) / (snr if predicted == "epsilon" else 1)
    acting = torch.tensor([0, 3, 6, 9])
    weights = ADAPTER.row_weights(policy, {TIME: acting})
    assert weights is not None
    torch.testing.assert_close(weights, by_hand[acting] / by_hand[acting].mean())
    # The lowest level hardly counts if noise is predicted, and the highest if the action is.
    assert weights.argmin() == (0 if predicted == "epsilon" else 3)
    others = ADAPTER.row_weights(policy, {TIME: torch.tensor([1, 11])})
    assert others is not None
    torch.testing.assert_close(others, by_hand[[1, 11]] / by_hand[acting].mean())


def test_rows_without_a_level_of_noise_count_alike() -> None:
    assert ADAPTER.row_weights(diffusion.policy(cameras=0), batch()) is None
    assert ADAPTER.epsilon_of("conditioning") == DEFAULT_EPSILON
    assert ADAPTER.epsilon_of("up") < DEFAULT_EPSILON


def test_the_condition_needs_no_actions_and_pools_to_itself() -> None:
    policy, seen = diffusion.policy(cameras=0).eval(), batch()
    request = FeatureRequest(stack="conditioning", layers=(0,))
    keys = ADAPTER.input_keys(policy, seen, request)
    assert set(keys) == {"observation.state", "observation.environment_state"}
    with torch.no_grad():
        found = ADAPTER.features(policy, {key: seen[key] for key in keys}, request)
    pooled = pool(found.hidden[0], found.masks, Pooling.LAST_TOKEN)
    by_hand = torch.cat([seen[key] for key in keys], dim=-1).flatten(1)
    assert torch.equal(pooled.vectors[:, 0], by_hand)


def test_a_single_frame_may_come_without_its_time_axis() -> None:
    policy = diffusion.policy(cameras=1, n_obs_steps=1).eval()
    seen = ADAPTER.anchor_inputs(policy, batch(cameras=1), seeds=SEEDS, own_actions=False)
    one = {key: seen[key][:, :1] for key in seen if key.startswith("observation")}
    bare = {**seen, **one, CAMERAS[0]: one[CAMERAS[0]][:, 0]}
    with_axis, without = features(policy, {**seen, **one}, "up"), features(policy, bare, "up")
    assert torch.equal(with_axis.hidden[1], without.hidden[1])


def test_a_compiled_unet_is_tapped_like_another() -> None:
    plain, seen = diffusion.policy(cameras=0), batch()
    compiled = diffusion.policy(cameras=0)
    # As LeRobot does with `compile_model`, without loading a compiler that would never run.
    compiled.diffusion.unet = torch.compile(compiled.diffusion.unet, backend="eager")
    anchors = ADAPTER.anchor_inputs(plain, seen, seeds=SEEDS, own_actions=False)
    for stack in ADAPTER.stacks(plain):
        one, other = features(plain, anchors, stack), features(compiled, anchors, stack)
        assert torch.equal(one.hidden[0], other.hidden[0])
