"""Flow matching by an expert: the adapters of smolvla, pi05 and pi0 beyond the common suite."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_ATTENTION_MASK
from tiny import pi0, pi05, smolvla
from tiny.inputs import LENGTHS, ROWS, SEEDS, model_inputs, processed, with_other_padding
from tiny.world import ACTIONS, CAMERAS

from craftcli.cache.build.recipe import resolve_recipe
from craftcli.choices import Pooling
from craftcli.config.cache import CacheConfig
from craftcli.errors import CraftError
from craftcli.policies.base import NOISE, TIME, FeatureRequest, Features, PolicyAdapter
from craftcli.policies.families.flow import EXPERT, VLM
from craftcli.policies.families.registry import adapter_for
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.pooling import pool

PER_CAMERA = {"smolvla": 2**2, "pi05": 4**2, "pi0": 4**2}
"""Image tokens at 32 px: patches of 8 px; smolvla joins 2 by 2 of them."""
STATE_TOKENS = {"smolvla": 1, "pi05": 0, "pi0": 0}

families = pytest.mark.parametrize("family", list(PER_CAMERA))
stacks = pytest.mark.parametrize("stack", [VLM, EXPERT])


@pytest.fixture(scope="module")
def vlm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smolvla.write_vlm(tmp_path_factory.mktemp("vlm"))


@pytest.fixture
def make(vlm_folder: Path) -> Callable[..., Any]:
    def policy(family: str, **settings: Any) -> Any:
        if family == "smolvla":
            return smolvla.policy(vlm_folder, **settings).eval()
        return {"pi05": pi05, "pi0": pi0}[family].policy(**settings).eval()

    return policy


@pytest.fixture(scope="module")
def pi05_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(str(pi05.make(tmp_path_factory.mktemp("pi05"))), device="cpu")


def adapter_of(policy: Any) -> PolicyAdapter:
    return adapter_for(policy.config.type)


def anchors(policy: Any, batch: dict[str, Any], *, own_actions: bool = False) -> dict[str, Any]:
    return adapter_of(policy).anchor_inputs(policy, batch, seeds=SEEDS, own_actions=own_actions)


def features(
    policy: Any, batch: dict[str, Any], stack: str = EXPERT, *, output: bool = False
) -> Features:
    adapter = adapter_of(policy)
    layers = tuple(range(len(adapter.stack(policy, stack))))
    with torch.no_grad():
        return adapter.features(
            policy, batch, FeatureRequest(stack=stack, layers=layers, output=output)
        )


@families
def test_the_output_is_the_velocity_of_the_policys_own_loss(family: str, make: Any) -> None:
    policy = make(family)
    batch = anchors(policy, processed(policy))
    actions = policy.prepare_action(batch)
    with torch.no_grad():
        losses = policy.model.forward(
            *model_inputs(policy, batch), actions, batch[NOISE], batch[TIME]
        )
    found = features(policy, batch, output=True).output
    assert found is not None
    assert found.values.shape == (ROWS, policy.config.chunk_size, ACTIONS)
    squared = ((batch[NOISE] - actions)[..., :ACTIONS] - found.values) ** 2
    torch.testing.assert_close(squared, losses[..., :ACTIONS])
    assert found.mask.all()


@families
def test_own_actions_are_sampled_from_a_noise_of_their_own(family: str, make: Any) -> None:
    policy = make(family)
    batch = processed(policy)
    found = anchors(policy, batch, own_actions=True)
    from_same_noise = policy.predict_action_chunk(dict(batch), noise=found[NOISE])
    assert found[ACTION].shape == batch[ACTION].shape
    assert not torch.allclose(found[ACTION], from_same_noise, atol=1e-2)
    # Whatever the labels are, and whichever rows it is sampled with.
    again = anchors(policy, {**batch, ACTION: torch.zeros_like(batch[ACTION])}, own_actions=True)
    assert torch.equal(again[ACTION], found[ACTION])


@families
def test_times_are_those_the_policy_trains_with(family: str, make: Any) -> None:
    policy = make(family)
    batch = {
        key: value[:1].expand(400, *value.shape[1:]) for key, value in processed(policy).items()
    }
    found = adapter_of(policy).anchor_inputs(policy, batch, seeds=range(400), own_actions=False)
    torch.manual_seed(0)
    drawn = policy.model.sample_time(4000, "cpu")
    assert abs(found[TIME].mean() - drawn.mean()) < 0.05
    assert abs(found[TIME].std() - drawn.std()) < 0.05
    assert abs(found[NOISE].mean()) < 0.05
    assert abs(found[NOISE].std() - 1) < 0.05
    assert len(found[TIME].unique()) == 400


@families
@stacks
@pytest.mark.parametrize(
    "pooling", [Pooling.VISION_TEXT, Pooling.MEAN_MASKED, Pooling.ACTION_TOKENS]
)
def test_padding_never_changes_a_pooled_vector(
    family: str, stack: str, pooling: Pooling, make: Any
) -> None:
    policy = make(family)
    batch = anchors(policy, processed(policy))
    before, after = (
        features(policy, batch, stack),
        features(policy, with_other_padding(batch), stack),
    )
    for layer in before.hidden:
        one, two = (pool(f.hidden[layer], f.masks, pooling) for f in (before, after))
        assert torch.equal(one.mask, two.mask)
        assert torch.equal(one.vectors, two.vectors)


@families
@pytest.mark.parametrize(("px", "cameras"), [(16, 1), (32, 2), (64, 2)])
def test_image_tokens_are_as_many_as_the_policy_embeds(
    family: str, px: int, cameras: int, make: Any
) -> None:
    policy = make(family, px=px, cameras=cameras)
    batch = anchors(policy, processed(policy, cameras=CAMERAS[:cameras]))
    inner = getattr(policy.model, "vlm_with_expert", None) or policy.model.paligemma_with_expert
    one = inner.embed_image(torch.zeros(1, 3, px, px)).shape[1]
    masks = features(policy, batch, VLM).masks
    assert (
        one == PER_CAMERA[family] * (px // 32) ** 2 if px >= 32 else one * 4 == PER_CAMERA[family]
    )
    assert masks.image.sum(1).tolist() == [cameras * one] * ROWS
    text = batch[OBS_LANGUAGE_ATTENTION_MASK].sum(1) + STATE_TOKENS[family]
    assert torch.equal(masks.text.sum(1), text)
    assert text.tolist() == [length + STATE_TOKENS[family] for length in LENGTHS]
    # The camera that no dataset has is there, masked.
    assert (
        masks.image.shape[1]
        == (cameras + 1) * one + policy.config.tokenizer_max_length + (STATE_TOKENS[family])
    )


@families
@stacks
def test_a_missing_camera_is_left_out(family: str, stack: str, make: Any) -> None:
    """Its tokens are masked: no image that might have been there changes anything."""
    policy = make(family)
    whole = anchors(policy, processed(policy))
    batch = {key: value for key, value in whole.items() if key != CAMERAS[1]}
    assert CAMERAS[1] not in adapter_of(policy).input_keys(
        policy, batch, FeatureRequest(stack=stack)
    )
    found = features(policy, batch, stack)
    if stack == VLM:
        assert found.masks.image.sum(1).tolist() == [PER_CAMERA[family]] * ROWS
        first = found.hidden[0][:, : PER_CAMERA[family]].mean(1, keepdim=True)
        pooled = pool(found.hidden[0], found.masks, Pooling.MEAN_IMAGE_TOKENS)
        torch.testing.assert_close(pooled.vectors, first)
    other = features(policy, whole, stack)
    assert not torch.allclose(found.hidden[0], other.hidden[0][:, : found.hidden[0].shape[1]])


@families
def test_actions_past_the_end_of_an_episode_do_not_count(family: str, make: Any) -> None:
    policy = make(family)
    padded = torch.zeros(ROWS, policy.config.chunk_size, dtype=torch.bool)
    padded[1, 2:] = True
    batch = {**processed(policy), "action_is_pad": padded}
    found = features(policy, anchors(policy, batch), output=True).output
    assert found is not None
    assert torch.equal(found.mask, ~padded)
    own = features(policy, anchors(policy, batch, own_actions=True), output=True).output
    assert own is not None
    assert own.mask.all()


@families
def test_time_and_noise_reach_the_expert_and_not_the_language_model(family: str, make: Any) -> None:
    policy = make(family)
    batch = anchors(policy, processed(policy))
    for key in (TIME, NOISE):
        changed = {**batch, key: batch[key] * 0.5}
        one, two = features(policy, batch), features(policy, changed)
        assert all(not torch.equal(one.hidden[n], two.hidden[n]) for n in one.hidden)
        one, two = (features(policy, b, VLM, output=True) for b in (batch, changed))
        assert all(
            torch.equal(one.hidden[n][one.masks.prefix], two.hidden[n][two.masks.prefix])
            for n in one.hidden
        )


@pytest.mark.parametrize(
    ("stack", "pooling", "lacks"),
    [
        (EXPERT, Pooling.MEAN_MASKED, "no image or text tokens.*--pooling action_tokens"),
        (EXPERT, Pooling.VISION_TEXT, "no image or text tokens.*--pooling action_tokens"),
        (VLM, Pooling.MEAN_ACTION_TOKENS, "no action tokens.*--pooling vision_text"),
    ],
)
def test_a_pooling_that_a_stack_has_no_tokens_for_is_refused(
    stack: str, pooling: Pooling, lacks: str, pi05_checkpoint: Checkpoint
) -> None:
    config = CacheConfig(stack=stack, pooling=pooling, device="cpu")
    with pytest.raises(CraftError, match=f"the stack {stack} of craft_tiny_pi05 has {lacks}"):
        resolve_recipe(config, pi05_checkpoint)


def test_each_stack_has_a_pooling_of_its_own(pi05_checkpoint: Checkpoint) -> None:
    recipes = {
        stack: resolve_recipe(CacheConfig(stack=stack, device="cpu"), pi05_checkpoint).pooling
        for stack in (VLM, EXPERT)
    }
    assert recipes == {VLM: Pooling.VISION_TEXT, EXPERT: Pooling.ACTION_TOKENS}
