"""ACT: image tokens are the backbone's pixels, padded actions do not count, the latent is zero."""

from typing import Any

import pytest
import torch
from tiny import act
from tiny.world import ACTIONS, CAMERAS, ENV, STATE

from craftcli.cache.layers import resolve_layers
from craftcli.choices import Pooling
from craftcli.policies.base import FeatureRequest, Features
from craftcli.policies.families.act import ActAdapter
from craftcli.policies.pooling import pool

ADAPTER = ActAdapter()
ROWS = 3


def batch(*, cameras: int, px: int = 64) -> dict[str, Any]:
    torch.manual_seed(1)
    inputs = {camera: torch.rand(ROWS, 3, px, px) for camera in CAMERAS[:cameras]}
    padding = torch.zeros(ROWS, act.CHUNK, dtype=torch.bool)
    padding[0, 1:] = padding[2, -1:] = True
    return {
        **inputs,
        "observation.state": torch.randn(ROWS, STATE),
        "observation.environment_state": torch.randn(ROWS, ENV),
        "action": torch.randn(ROWS, act.CHUNK, ACTIONS),
        "action_is_pad": padding,
    }


def features(policy: Any, inputs: dict[str, Any], stack: str) -> Features:
    with torch.no_grad():
        return ADAPTER.features(
            policy.eval(), inputs, FeatureRequest(stack=stack, layers=(0, 1), output=True)
        )


@pytest.mark.parametrize(("px", "cameras"), [(32, 1), (64, 2), (96, 1), (128, 2)])
def test_image_tokens_are_the_pixels_of_the_backbone(px: int, cameras: int) -> None:
    policy = act.policy(cameras=cameras, px=px)
    seen = batch(cameras=cameras, px=px)
    pixels = policy.model.backbone(seen[CAMERAS[0]])["feature_map"][0, 0].numel()
    found = features(policy, seen, "encoder")
    assert found.masks.image.sum(1).tolist() == [cameras * pixels] * ROWS
    assert found.masks.text.sum(1).tolist() == [2] * ROWS  # latent and state
    assert found.hidden[1].shape[1] == cameras * pixels + 2
    by_hand = found.hidden[1][:, 2:].mean(1, keepdim=True)
    pooled = pool(found.hidden[1], found.masks, Pooling.MEAN_IMAGE_TOKENS).vectors
    torch.testing.assert_close(pooled, by_hand)


def test_a_policy_without_cameras_has_three_tokens_and_no_image() -> None:
    found = features(act.policy(cameras=0), batch(cameras=0), "encoder")
    assert found.masks.text.all()
    assert not found.masks.image.any()
    assert found.hidden[0].shape[1] == 3  # latent, state, state of the environment


def test_actions_past_the_end_of_an_episode_do_not_count() -> None:
    policy, seen = act.policy(cameras=0), batch(cameras=0)
    found = features(policy, seen, "decoder")
    assert torch.equal(found.masks.action, ~seen["action_is_pad"])
    assert found.output is not None
    assert torch.equal(found.output.mask, ~seen["action_is_pad"])
    kept = pool(found.hidden[1], found.masks, Pooling.ACTION_TOKENS)
    assert not kept.vectors[seen["action_is_pad"]].any()


def test_the_policys_own_actions_all_count() -> None:
    policy, seen = act.policy(cameras=0), batch(cameras=0)
    anchors = ADAPTER.anchor_inputs(policy, seen, seeds=[1, 2, 3], own_actions=True)
    request = FeatureRequest(stack="decoder", layers=(1,))
    assert "action_is_pad" not in ADAPTER.input_keys(policy, anchors, request)
    assert features(policy, anchors, "decoder").masks.action.all()


def test_the_output_is_the_chunk_that_the_policy_acts_on() -> None:
    policy, seen = act.policy(cameras=2), batch(cameras=2)
    found = features(policy, seen, "decoder")
    assert found.output is not None
    assert torch.equal(found.output.values, policy.predict_action_chunk(seen))


def test_actions_of_the_data_do_not_reach_the_states() -> None:
    """In training they would, through the variational encoder."""
    policy, seen = act.policy(cameras=0), batch(cameras=0)
    changed = {**seen, "action": seen["action"] + 1}
    for stack in ("encoder", "decoder"):
        one, other = features(policy, seen, stack), features(policy, changed, stack)
        assert torch.equal(one.hidden[1], other.hidden[1])


def test_the_default_layer_exists_in_lerobots_own_act() -> None:
    assert resolve_layers(ADAPTER.default_layers, count=1) == (0,)
