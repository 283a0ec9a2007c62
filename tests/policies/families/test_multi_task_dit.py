"""Multi-task DiT: by diffusion and by flow, it predicts what it is trained on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import multi_task_dit as dit
from tiny.family import SEED, keyword_of, own_forward
from tiny.world import ACTIONS, CAMERAS, PX, STATE
from torch.nn import functional

from craftcli.policies.base import NOISE, TIME, FeatureRequest, Features
from craftcli.policies.families.multi_task_dit import MultiTaskDitAdapter

ADAPTER = MultiTaskDitAdapter()
ROWS, SEEDS = 2, [1, 2]
TOKENS = "observation.language.tokens"


def batch(*, cameras: int = 2, px: int = PX) -> dict[str, Any]:
    torch.manual_seed(1)
    tokens = torch.tensor([[3, 4, 5, 1, 0, 0, 0, 0], [6, 7, 8, 9, 10, 1, 0, 0]])
    padding = torch.zeros(ROWS, dit.HORIZON, dtype=torch.bool)
    padding[0, 5:] = True
    return {
        **{camera: torch.rand(ROWS, 2, 3, px, px) for camera in CAMERAS[:cameras]},
        "observation.state": torch.randn(ROWS, 2, STATE),
        "action": torch.randn(ROWS, dit.HORIZON, ACTIONS),
        "action_is_pad": padding,
        TOKENS: tokens,
        "observation.language.attention_mask": tokens > 0,
    }


def features(policy: Any, inputs: dict[str, Any], stack: str = "transformer") -> Features:
    with torch.no_grad():
        return ADAPTER.features(
            policy.eval(), inputs, FeatureRequest(stack=stack, layers=(0,), output=True)
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "diffusion"},
        {"objective": "diffusion", "prediction_type": "sample", "do_mask_loss_for_padding": True},
        {"objective": "flow_matching", "sigma_min": 0.1},
        {"objective": "flow_matching", "timestep_sampling_strategy": "uniform", "use_rope": False},
    ],
)
def test_the_prediction_gives_the_policys_own_loss(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    policy = dit.policy(tmp_path, **settings).eval()
    seen = batch()
    seen |= dit.DIFFUSED.draw(policy, seen)
    torch.manual_seed(SEED)
    with torch.no_grad():
        expected, _ = policy(seen)
    output = features(policy, seen).output
    assert output is not None
    if policy.config.is_flow_matching:
        target = seen["action"] - (1 - policy.config.sigma_min) * seen[NOISE]
    else:
        target = seen["action" if policy.config.prediction_type == "sample" else NOISE]
    kept = output.mask
    assert kept.all() != policy.config.do_mask_loss_for_padding
    torch.testing.assert_close(functional.mse_loss(output.values[kept], target[kept]), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "diffusion", "noise_scheduler_type": "DDIM"},
        {"objective": "flow_matching", "integration_method": "euler"},
        {"objective": "flow_matching", "integration_method": "rk4"},
    ],
)
def test_own_actions_are_what_the_policy_samples_from_that_noise(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = dit.policy(tmp_path, **settings).eval()
    seen = batch()
    starts: list[torch.Tensor] = []
    handle = policy.noise_predictor.register_forward_pre_hook(
        lambda _module, args: starts.append(args[0].clone())
    )
    own = ADAPTER.anchor_inputs(policy, seen, seeds=SEEDS, own_actions=True)
    handle.remove()
    condition = keyword_of(policy, "noise_predictor", "conditioning_vec", own_forward(policy, seen))
    # The policy's own sampler draws its start itself: it is handed the one that was used.
    monkeypatch.setattr(torch, "randn", lambda *_args, **_keywords: starts[0])
    with torch.no_grad():
        expected = policy.objective.conditional_sample(policy.noise_predictor, ROWS, condition)
    assert torch.equal(own["action"], expected)
    assert not torch.equal(starts[0], own[NOISE])


def test_times_of_flow_are_within_the_policys_range(tmp_path: Path) -> None:
    policy = dit.policy(tmp_path, objective="flow_matching").eval()
    drawn = ADAPTER.anchor_inputs(policy, batch(), seeds=SEEDS, own_actions=False)
    assert drawn[TIME].dtype == torch.float32
    assert ((drawn[TIME] >= 0) & (drawn[TIME] <= policy.config.timestep_sampling_s)).all()
    assert drawn[TIME].unique().numel() == ROWS


@pytest.mark.parametrize(("px", "cameras"), [(32, 1), (64, 1), (64, 2), (96, 2)])
def test_the_condition_is_what_the_policy_encodes(px: int, cameras: int, tmp_path: Path) -> None:
    """Its images are no tokens of their own: one vector has a part of each."""
    policy = dit.policy(tmp_path, cameras=cameras, px=px).eval()
    seen = batch(cameras=cameras, px=px)
    with torch.no_grad():
        one = policy.observation_encoder.vision_encoder(seen[CAMERAS[0]][:, 0]).flatten(1).shape[1]
        none = policy.observation_encoder.conditioning_dim - 2 * cameras * one
    encoded = keyword_of(policy, "noise_predictor", "conditioning_vec", own_forward(policy, seen))
    drawn = ADAPTER.anchor_inputs(policy, seen, seeds=SEEDS, own_actions=False)
    found = features(policy, drawn, "conditioning")
    assert torch.equal(found.hidden[0], encoded.unsqueeze(1))
    # Two steps of observations, each with every camera, the state and the text.
    text = policy.config.hidden_dim
    assert none == 2 * (STATE + text)
    assert not found.masks.image.any()
    assert found.masks.text.all()


def test_padding_of_the_text_changes_nothing(tmp_path: Path) -> None:
    policy = dit.policy(tmp_path).eval()
    seen = ADAPTER.anchor_inputs(policy, batch(), seeds=SEEDS, own_actions=False)
    there = seen["observation.language.attention_mask"]
    changed = {**seen, TOKENS: torch.where(there, seen[TOKENS], 5)}
    for stack in ADAPTER.stacks(policy):
        one, other = features(policy, seen, stack), features(policy, changed, stack)
        torch.testing.assert_close(one.hidden[0], other.hidden[0])
    another = {**seen, TOKENS: seen[TOKENS].roll(1, dims=0)}
    assert not torch.equal(features(policy, another).hidden[0], features(policy, seen).hidden[0])
