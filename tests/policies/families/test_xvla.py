"""xvla: its views, its own sampling, and checkpoints in its older layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.utils.constants import ACTION
from safetensors.torch import load_file, save_file
from tiny import xvla
from tiny.inputs import LENGTHS, ROWS, SEEDS, processed
from tiny.world import ACTIONS, CAMERAS

from craftcli.policies.base import NOISE, TIME, FeatureRequest, Features
from craftcli.policies.families.xvla import XvlaAdapter
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.weight_files import WEIGHTS_FILE
from craftcli.policies.seeded_noise import normal_rows, row_generators

ADAPTER = XvlaAdapter()


def anchors(policy: Any, *, own_actions: bool = False, **settings: Any) -> dict[str, Any]:
    batch = processed(policy, **settings)
    return ADAPTER.anchor_inputs(policy, batch, seeds=SEEDS, own_actions=own_actions)


def features(policy: Any, batch: dict[str, Any], stack: str) -> Features:
    layers = tuple(range(len(ADAPTER.stack(policy, stack))))
    with torch.no_grad():
        return ADAPTER.features(policy, batch, FeatureRequest(stack=stack, layers=layers))


@pytest.mark.parametrize(("px", "cameras"), [(32, 1), (64, 2)])
def test_image_tokens_are_as_many_as_the_policy_embeds(px: int, cameras: int) -> None:
    policy = xvla.policy(px=px, cameras=cameras).eval()
    batch = anchors(policy, cameras=CAMERAS[:cameras])
    one = policy.model.vlm.get_image_features(torch.zeros(1, 3, px, px)).pooler_output.shape[1]
    assert one == (px // 8) ** 2 + 1  # and their mean
    first = features(policy, batch, "vlm").masks
    assert first.image.sum(1).tolist() == [one] * ROWS
    assert first.text.sum(1).tolist() == list(LENGTHS)
    assert not first.action.any()
    masks = features(policy, batch, "transformer").masks
    assert masks.image.sum(1).tolist() == [cameras * one] * ROWS
    assert masks.text.sum(1).tolist() == list(LENGTHS)
    assert masks.action_span == (0, xvla.CHUNK)
    assert masks.action.sum(1).tolist() == [xvla.CHUNK] * ROWS
    # Actions, the first view, the prompt, the other views with the missing one, soft prompts.
    assert masks.image.shape[1] == xvla.CHUNK + (cameras + 1) * one + 12 + 2
    assert masks.image[:, xvla.CHUNK : xvla.CHUNK + one].all()


def test_a_missing_camera_is_left_out() -> None:
    policy = xvla.policy().eval()
    masks = features(policy, anchors(policy, cameras=CAMERAS[:1]), "transformer").masks
    assert masks.image.sum(1).tolist() == [65] * ROWS


def test_own_actions_are_what_the_policy_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = xvla.policy().eval()
    own = anchors(policy, own_actions=True)
    generators, shape = row_generators(SEEDS), (xvla.CHUNK, policy.model.dim_action)
    time = torch.cat([torch.rand(1, generator=generator) for generator in generators])
    assert torch.equal(own[TIME], time)
    assert torch.equal(own[NOISE], normal_rows(generators, shape))
    start = normal_rows(generators, shape)
    # The policy's own sampler draws its start itself: it is handed the one of the anchors.
    monkeypatch.setattr(torch, "randn", lambda *_args, **_keywords: start)
    assert torch.equal(own[ACTION], policy.predict_action_chunk(processed(policy)))
    assert own[ACTION].shape == (ROWS, xvla.CHUNK, ACTIONS)


def test_the_output_is_the_prediction_of_the_policys_own_loss() -> None:
    policy = xvla.policy().eval()
    batch = processed(policy)
    batch |= xvla.XVLA.draw(policy, batch)
    with torch.no_grad():
        found = ADAPTER.features(policy, batch, FeatureRequest(output=True)).output
        torch.manual_seed(7)
        loss, _ = policy(dict(batch))
    assert found is not None
    torch.testing.assert_close((found.values - batch[ACTION]).square().mean(), loss)


def test_bfloat16_gives_the_same_features_to_its_precision() -> None:
    exact, rounded = xvla.policy().eval(), xvla.policy(dtype="bfloat16").eval()
    assert ADAPTER.compute_dtype(rounded) is torch.bfloat16
    batch = anchors(exact)
    for stack in ("vlm", "transformer"):
        one, two = features(exact, batch, stack), features(rounded, batch, stack)
        for layer, states in one.hidden.items():
            assert two.hidden[layer].dtype is torch.bfloat16
            assert (two.hidden[layer].float() - states).norm() / states.norm() < 0.03


def test_noise_and_time_reach_the_action_tokens() -> None:
    policy = xvla.policy().eval()
    batch = anchors(policy)
    before = features(policy, batch, "transformer")
    for key in (NOISE, TIME):
        after = features(policy, {**batch, key: batch[key] * 0.5}, "transformer")
        assert not torch.equal(before.hidden[2], after.hidden[2])


def test_a_checkpoint_in_the_older_layout_opens(tmp_path: Path) -> None:
    """LeRobot renames its tensors, so that the file's names are not the policy's."""
    folder = xvla.make(tmp_path / "xvla")
    weights = load_file(folder / WEIGHTS_FILE)
    older = {
        name.replace("vlm.language_model.", "vlm.language_model.model."): tensor
        for name, tensor in weights.items()
    }
    assert older.keys() != weights.keys()
    save_file(older, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    loaded = load_checkpoint(str(folder), device="cpu").policy.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
