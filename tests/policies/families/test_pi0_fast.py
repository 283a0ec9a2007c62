"""The adapter reads what the policy computes, whatever the padding, cameras and precision."""

from typing import Any

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.utils.constants import (
    ACTION_TOKEN_MASK,
    ACTION_TOKENS,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
)

from craftcli.cache.layers import resolve_layers
from craftcli.choices import Pooling
from craftcli.demo.configuration_tiny_pi0_fast import TinyPI0FastConfig
from craftcli.demo.datasets import CAMERA
from craftcli.demo.modeling_tiny_pi0_fast import TinyPI0FastPolicy
from craftcli.errors import CraftError
from craftcli.policies.base import FeatureRequest
from craftcli.policies.families.pi0_fast import Pi0FastAdapter
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.pooling import needs_action_tokens, pool

ALL_LAYERS = (0, 1, 2, 3)
DTYPES = ("float32", "bfloat16")


@pytest.fixture
def batch(teacher: Any, old_data: Any) -> dict[str, Any]:
    return teacher.preprocess(read_rows(old_data, [0, 7, 100, 400]))


def features(policy: Any, batch: dict[str, Any], *, with_actions: bool = True) -> Any:
    policy.eval()
    with torch.no_grad():
        return Pi0FastAdapter().features(
            policy,
            batch,
            FeatureRequest(stack="vlm", layers=ALL_LAYERS, with_actions=with_actions),
        )


def layer_outputs(policy: Any, batch: dict[str, Any]) -> dict[int, torch.Tensor]:
    """What the decoder layers return in the policy's own training forward."""
    outputs: dict[int, torch.Tensor] = {}
    layers = policy.model.paligemma_with_expert.paligemma.model.language_model.layers
    handles = [
        layer.register_forward_hook(lambda _m, _a, out, i=i: outputs.__setitem__(i, out))
        for i, layer in enumerate(layers)
    ]
    policy.eval()
    with torch.no_grad():
        policy(batch)
    for handle in handles:
        handle.remove()
    return outputs


def test_taps_equal_the_layers_of_the_full_forward(teacher: Any, batch: dict[str, Any]) -> None:
    expected = layer_outputs(teacher.policy, batch)
    tapped = features(teacher.policy, batch).hidden
    assert set(tapped) == set(ALL_LAYERS)
    for layer in ALL_LAYERS:
        assert torch.equal(tapped[layer], expected[layer])


def test_prefix_alone_gives_the_same_states(teacher: Any, batch: dict[str, Any]) -> None:
    full = features(teacher.policy, batch)
    prefix = features(teacher.policy, batch, with_actions=False)
    length = prefix.masks.image.shape[1]
    valid = prefix.masks.prefix
    assert torch.equal(valid, full.masks.prefix[:, :length])
    for layer in ALL_LAYERS:
        torch.testing.assert_close(
            prefix.hidden[layer][valid], full.hidden[layer][:, :length][valid], rtol=0, atol=1e-4
        )


def test_masks_are_the_policys_own(teacher: Any, batch: dict[str, Any]) -> None:
    masks = features(teacher.policy, batch).masks
    image, text, action = (m.sum(1) for m in (masks.image, masks.text, masks.action))
    assert image.tolist() == [9, 9, 9, 9]  # 3 x 3 patches of 16 px
    assert torch.equal(text, batch[OBS_LANGUAGE_ATTENTION_MASK].sum(1))
    assert torch.equal(action, batch[ACTION_TOKEN_MASK].sum(1))
    assert masks.action_span == (9 + 14, 9 + 14 + 11)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_padding_never_changes_a_pooled_vector(
    teacher: Any, batch: dict[str, Any], pooling: Pooling
) -> None:
    # The demo's sequences are all of one length, so that some of their tokens become padding here.
    batch, changed = dict(batch), dict(batch)
    for tokens, mask in (
        (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK),
        (ACTION_TOKENS, ACTION_TOKEN_MASK),
    ):
        valid = batch[mask].bool().clone()
        valid[0, -3:] = valid[2, -5:] = False
        batch[mask] = changed[mask] = valid
        changed[tokens] = torch.where(valid, batch[tokens], 42)
        assert not torch.equal(changed[tokens], batch[tokens])
    with_actions = needs_action_tokens(pooling)
    before = features(teacher.policy, batch, with_actions=with_actions)
    after = features(teacher.policy, changed, with_actions=with_actions)
    for layer in ALL_LAYERS:
        one = pool(before.hidden[layer], before.masks, pooling)
        two = pool(after.hidden[layer], after.masks, pooling)
        assert torch.equal(one.mask, two.mask)
        torch.testing.assert_close(one.vectors, two.vectors, rtol=1e-5, atol=1e-4)


def make_policy(*, resolution: int, cameras: int, dtype: str = "float32") -> Any:
    config = TinyPI0FastConfig(
        device="cpu", push_to_hub=False, image_resolution=(resolution, resolution), dtype=dtype
    )
    config.input_features = {
        f"observation.images.camera{i}": PolicyFeature(
            type=FeatureType.VISUAL, shape=(3, resolution, resolution)
        )
        for i in range(cameras)
    }
    config.input_features["observation.state"] = PolicyFeature(type=FeatureType.STATE, shape=(2,))
    config.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=(2,))}
    torch.manual_seed(0)
    return TinyPI0FastPolicy(config)


def with_cameras(batch: dict[str, Any], resolution: int, present: int) -> dict[str, Any]:
    cameras = {
        f"observation.images.camera{i}": torch.rand(4, 3, resolution, resolution)
        for i in range(present)
    }
    return {key: value for key, value in batch.items() if key != CAMERA} | cameras


@pytest.mark.parametrize(
    ("resolution", "cameras", "present"), [(32, 1, 1), (64, 2, 2), (64, 3, 1), (224, 2, 1)]
)
def test_image_tokens_are_counted_from_the_cameras_that_are_there(
    batch: dict[str, Any], resolution: int, cameras: int, present: int
) -> None:
    policy = make_policy(resolution=resolution, cameras=cameras)
    seen = with_cameras(batch, resolution, present)
    per_camera = policy.model.paligemma_with_expert.embed_image(
        seen["observation.images.camera0"]
    ).shape[1]
    masks = features(policy, seen).masks
    assert per_camera == (resolution // 16) ** 2
    assert masks.image.sum(1).tolist() == [present * per_camera] * 4
    assert masks.image.shape[1] == cameras * per_camera + 14 + 11


def test_a_missing_camera_does_not_move_the_pooled_image(batch: dict[str, Any]) -> None:
    """Its tokens are there, masked; their content must not leak into the mean."""
    policy = make_policy(resolution=32, cameras=2)
    seen = with_cameras(batch, 32, 1)
    found = features(policy, seen)
    pooled = pool(found.hidden[3], found.masks, Pooling.MEAN_IMAGE_TOKENS)
    by_hand = found.hidden[3][:, :4].mean(1, keepdim=True)
    torch.testing.assert_close(pooled.vectors, by_hand)


def test_a_bfloat16_policy_is_tapped_in_its_own_precision(batch: dict[str, Any]) -> None:
    policy = make_policy(resolution=32, cameras=1, dtype="bfloat16")
    seen = with_cameras(batch, 32, 1)
    expected = layer_outputs(policy, seen)
    tapped = features(policy, seen).hidden
    assert tapped[3].dtype == torch.bfloat16
    assert torch.equal(tapped[3], expected[3])


def test_bfloat16_gives_the_same_features_to_its_precision(batch: dict[str, Any]) -> None:
    exact, rounded = (make_policy(resolution=32, cameras=1, dtype=d) for d in DTYPES)
    seen = with_cameras(batch, 32, 1)
    one, two = features(exact, seen), features(rounded, seen)
    valid = one.masks.prefix | one.masks.action
    for layer, states in one.hidden.items():
        assert two.hidden[layer].dtype is torch.bfloat16
        error = (two.hidden[layer].float() - states)[valid].norm() / states[valid].norm()
        assert 0 < error < 0.03


@pytest.mark.parametrize(("layers", "same"), [((-2, -1), (2, 3)), ((0,), (-4,))])
def test_layers_of_both_signs_are_the_same(
    teacher: Any, layers: tuple[int, ...], same: tuple[int, ...]
) -> None:
    count = len(teacher.adapter.stack(teacher.policy, "vlm"))
    assert resolve_layers(layers, count) == resolve_layers(same, count)


def test_the_forward_stops_after_the_last_layer(teacher: Any, batch: dict[str, Any]) -> None:
    ran: list[int] = []
    layers = teacher.policy.model.paligemma_with_expert.paligemma.model.language_model.layers
    handles = [
        layer.register_forward_hook(lambda _m, _a, _o, i=i: ran.append(i))
        for i, layer in enumerate(layers)
    ]
    with torch.no_grad():
        teacher.adapter.features(teacher.policy, batch, FeatureRequest(stack="vlm", layers=(1,)))
    for handle in handles:
        handle.remove()
    assert ran == [0, 1]


def test_an_unknown_stack_lists_the_ones_there_are(teacher: Any) -> None:
    with pytest.raises(CraftError, match=r"no stack 'expert'.*has vlm"):
        teacher.adapter.stack(teacher.policy, "expert")
