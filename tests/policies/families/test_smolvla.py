"""smolvla: its kinds of attention, and the parts of it that are trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from tiny import smolvla
from tiny.inputs import ROWS, SEEDS, processed

from craftcli.errors import CraftError
from craftcli.policies.base import FeatureRequest
from craftcli.policies.families.smolvla import SmolVLAAdapter

ADAPTER = SmolVLAAdapter()


@pytest.fixture(scope="module")
def vlm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smolvla.write_vlm(tmp_path_factory.mktemp("vlm"))


def anchors(policy: Any) -> dict[str, Any]:
    batch = processed(policy)
    return ADAPTER.anchor_inputs(policy, batch, seeds=SEEDS, own_actions=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_mode": "self_attn"},
        {"num_expert_layers": 2, "attention_mode": "self_attn"},
        {"self_attn_every_n_layers": 3},
        {"add_image_special_tokens": True, "prefix_length": 40},
    ],
    ids=lambda settings: "-".join(settings),
)
@pytest.mark.parametrize("stack", ["vlm", "expert"])
def test_taps_are_right_however_the_expert_attends(
    vlm_folder: Path, settings: dict[str, Any], stack: str
) -> None:
    policy = smolvla.policy(vlm_folder, **settings).eval()
    batch = anchors(policy)
    batch |= smolvla.SMOLVLA.draw(policy, batch)
    layers = tuple(range(len(ADAPTER.stack(policy, stack))))
    expected = smolvla.SMOLVLA.reference(policy, batch, stack)
    for output in (False, True):
        with torch.no_grad():
            found = ADAPTER.features(
                policy, batch, FeatureRequest(stack=stack, layers=layers, output=output)
            )
        valid = found.masks.prefix | found.masks.action
        assert found.hidden.keys() == expected.keys()
        for layer, states in expected.items():
            torch.testing.assert_close(
                found.hidden[layer][valid], states[valid], rtol=1e-5, atol=1e-5
            )


def test_markers_around_images_are_text(vlm_folder: Path) -> None:
    policy = smolvla.policy(vlm_folder, add_image_special_tokens=True, prefix_length=60).eval()
    batch = anchors(policy)
    with torch.no_grad():
        masks = ADAPTER.features(policy, batch, FeatureRequest(stack="vlm", layers=(0,))).masks
    assert masks.image.shape == (ROWS, 60)
    camera = [False, False, True, True, True, True, False]
    assert masks.image[0, :21].tolist() == camera * 2 + [False] * 7
    assert masks.text[0, :21].tolist() == [not image for image in camera] * 2 + [
        True,
        True,
        *[False] * 4,  # the camera that is missing
        True,
    ]
    prompt = batch[OBS_LANGUAGE_ATTENTION_MASK].sum(1)
    assert torch.equal(masks.text.sum(1), 3 * 3 + prompt + 1)


def test_prompts_of_a_batch_are_padded_to_one_length_for_all(vlm_folder: Path) -> None:
    policy = smolvla.policy(vlm_folder).eval()
    batch = processed(policy)
    short = {
        **batch,
        OBS_LANGUAGE_TOKENS: batch[OBS_LANGUAGE_TOKENS][:, :8],
        OBS_LANGUAGE_ATTENTION_MASK: batch[OBS_LANGUAGE_ATTENTION_MASK][:, :8],
    }
    found = ADAPTER.anchor_inputs(policy, short, seeds=SEEDS, own_actions=True)
    expected = ADAPTER.anchor_inputs(policy, batch, seeds=SEEDS, own_actions=True)
    for key in ADAPTER.input_keys(policy, found, FeatureRequest(stack="expert", layers=(0,))):
        assert torch.equal(found[key], expected[key])


@pytest.mark.parametrize("expert_only", [True, False])
def test_the_language_model_is_held_when_it_is_trained(vlm_folder: Path, expert_only: bool) -> None:
    policy = smolvla.policy(
        vlm_folder, train_expert_only=expert_only, freeze_vision_encoder=expert_only
    ).eval()
    found = ADAPTER.features(policy, anchors(policy), FeatureRequest(stack="expert", layers=(3,)))
    found.hidden[3].square().sum().backward()
    touched = [n for n, p in policy.named_parameters() if p.grad is not None and p.grad.any()]
    vlm = "model.vlm_with_expert.vlm.model"
    for part in (f"{vlm}.vision_model", f"{vlm}.connector", f"{vlm}.text_model.layers.2"):
        assert any(name.startswith(part) for name in touched) is not expert_only
    assert any("lm_expert" in name for name in touched)


def test_a_mixed_policy_is_stored_in_the_wider_precision(vlm_folder: Path) -> None:
    policy = smolvla.policy(vlm_folder).eval()
    policy.model.vlm_with_expert.vlm.to(torch.bfloat16)
    assert ADAPTER.compute_dtype(policy) is torch.float32
    policy.model.vlm_with_expert.lm_expert.to(torch.bfloat16)
    assert ADAPTER.compute_dtype(policy) is torch.bfloat16


@pytest.mark.parametrize("parts", [("vlm",), ("vlm", "lm_expert")], ids="-".join)
@pytest.mark.parametrize("stack", ["vlm", "expert"])
def test_bfloat16_gives_the_same_features_to_its_precision(
    vlm_folder: Path, parts: tuple[str, ...], stack: str
) -> None:
    """LeRobot loads the language model in it, and the expert as it was saved."""
    exact, rounded = (smolvla.policy(vlm_folder).eval() for _ in range(2))
    for part in parts:
        getattr(rounded.model.vlm_with_expert, part).to(torch.bfloat16)
    request = FeatureRequest(stack=stack, layers=(0, 3))
    with torch.no_grad():
        one, two = (ADAPTER.features(p, anchors(p), request) for p in (exact, rounded))
    valid = one.masks.prefix | one.masks.action
    for layer, states in one.hidden.items():
        error = (two.hidden[layer].float() - states)[valid].norm() / states[valid].norm()
        assert 0 < error < 0.03


def test_a_row_may_lack_a_camera(vlm_folder: Path) -> None:
    policy = smolvla.policy(vlm_folder).eval()
    batch = anchors(policy)
    camera = ADAPTER.image_keys(policy, batch)[0]
    batch[f"{camera}_padding_mask"] = torch.tensor([True, False, True])
    request = FeatureRequest(stack="vlm", layers=(0,))
    assert f"{camera}_padding_mask" in ADAPTER.input_keys(policy, batch, request)
    with torch.no_grad():
        masks = ADAPTER.features(policy, batch, request).masks
    assert masks.image.sum(1).tolist() == [8, 4, 8]


def test_states_that_the_policy_rewrites_are_refused(vlm_folder: Path) -> None:
    policy = smolvla.policy(vlm_folder, adapt_to_pi_aloha=True)
    with pytest.raises(CraftError, match="adapt_to_pi_aloha"):
        ADAPTER.features(policy, anchors(policy), FeatureRequest(stack="expert", layers=(0,)))
