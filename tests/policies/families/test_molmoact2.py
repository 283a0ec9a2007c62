"""molmoact2: its prompts and images, its three ways to act, and what it keeps of old weights."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.utils.constants import ACTION
from tiny import molmoact2
from tiny.world import ACTIONS, STATE, TASKS, input_features

from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import NOISE, TIME, FeatureRequest, Features
from craftcli.policies.families.molmoact2 import TEXT_LENGTH, MolmoAct2Adapter

ADAPTER = MolmoAct2Adapter()
SEEDS = (1, 2)
FLOW = FeatureRequest(stack="expert", layers=(0, 2), output=True)
STATES = FeatureRequest(stack="vlm", layers=(0, 2))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return molmoact2.write_base(tmp_path_factory.mktemp("molmoact2") / "base")


def processed(policy: Any, *, tasks: tuple[str, ...] = TASKS, labelled: bool = True) -> Any:
    """Two rows with prompts of different lengths, as LeRobot's preprocessor gives them."""
    chance = torch.Generator().manual_seed(3)
    raw: dict[str, Any] = {
        key: torch.rand(len(tasks), *feature.shape, generator=chance)
        for key, feature in input_features(cameras=len(policy.config.image_features)).items()
        if key != "observation.state"
    }
    raw["observation.state"] = 2 * torch.rand(len(tasks), STATE, generator=chance) - 1
    if labelled:
        shape = (len(tasks), molmoact2.CHUNK, ACTIONS)
        raw[ACTION] = 2 * torch.rand(shape, generator=chance) - 1
    return molmoact2.processors(policy)[0]({**raw, "task": list(tasks)})


def anchors(policy: Any, batch: Any, *, own_actions: bool = False) -> dict[str, Any]:
    return ADAPTER.anchor_inputs(policy, batch, seeds=SEEDS, own_actions=own_actions)


def features(policy: Any, batch: dict[str, Any], request: FeatureRequest) -> Features:
    with torch.no_grad():
        return ADAPTER.features(policy, batch, request)


@pytest.mark.parametrize("mode", ["both", "continuous"])
def test_own_actions_are_what_the_policy_generates(base: Path, mode: str) -> None:
    policy = molmoact2.policy(base, action_mode=mode).eval()
    for task, seed in zip(TASKS, SEEDS, strict=True):
        # Alone: with others, LeRobot's policy counts the padding before its prompt.
        row = processed(policy, tasks=(task,), labelled=False)
        own = ADAPTER.anchor_inputs(policy, row, seeds=[seed], own_actions=True)
        generator = torch.Generator().manual_seed(seed)
        torch.randn(own[NOISE].shape, generator=generator)  # the noise of the anchor comes first
        expected = policy.predict_action_chunk(row, generator=generator).clamp(-1, 1)
        torch.testing.assert_close(own[ACTION][..., :ACTIONS], expected, rtol=1e-4, atol=1e-5)
        assert not own[ACTION][..., ACTIONS:].any()
        assert not own["action_horizon_is_pad"].any()


def test_times_are_those_of_the_policys_training(base: Path) -> None:
    policy = molmoact2.policy(base, flow_matching_time_offset=0.7, flow_matching_time_scale=0.1)
    time = anchors(policy, processed(policy))[TIME]
    assert time.unique().numel() == len(SEEDS)
    assert ((time > 0.7) & (time < 0.8)).all()


def test_anchors_are_prompts_without_their_actions(base: Path) -> None:
    policy = molmoact2.policy(base).eval()
    told, asked = processed(policy), processed(policy, labelled=False)
    assert told["input_ids"].shape[1] > asked["input_ids"].shape[1]
    assert not asked["attention_mask"].all()
    with_actions, without = anchors(policy, told), anchors(policy, asked)
    for key in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(with_actions[key], without[key])
    masks = features(policy, with_actions, STATES).masks
    assert masks.image.sum(1).tolist() == [2 * 4, 2 * 4]
    assert masks.prefix.sum(1).tolist() == asked["attention_mask"].sum(1).tolist()
    assert with_actions["input_ids"].shape[1] == TEXT_LENGTH + asked["token_type_ids"][0].sum()


def test_images_that_are_cut_into_parts(tmp_path: Path) -> None:
    folder = molmoact2.write_base(tmp_path / "base", crop_mode="overlap-and-resize-c2")
    policy = molmoact2.policy(folder).eval()
    batch = processed(policy)
    kept = anchors(policy, batch)
    assert kept["image_num_crops"].shape == (2, 2)
    assert (kept["image_num_crops"] > 1).all()
    together = features(policy, kept, FLOW)
    keys = ADAPTER.input_keys(policy, kept, FLOW)
    alone = features(policy, {key: kept[key][1:] for key in keys}, FLOW)
    for layer, states in alone.hidden.items():
        torch.testing.assert_close(states, together.hidden[layer][1:], rtol=1e-4, atol=1e-5)
    row = molmoact2.single_rows(batch)[1]
    assert torch.equal(kept["pixel_values"][1], row["pixel_values"])


def test_an_instruction_that_is_too_long_is_refused(base: Path) -> None:
    policy = molmoact2.policy(base).eval()
    batch = processed(policy, tasks=(TASKS[0], "push the red block and " * 60))
    with pytest.raises(CraftError, match="An instruction is too long to be stored"):
        anchors(policy, batch)


def test_a_policy_that_acts_by_tokens_has_its_language_model_alone(base: Path) -> None:
    policy = molmoact2.policy(base, action_mode="discrete", inference_action_mode="discrete").eval()
    kept = anchors(policy, processed(policy), own_actions=True)
    assert NOISE not in kept
    assert ADAPTER.stacks(policy).keys() == {"vlm"}
    assert features(policy, kept, STATES).hidden.keys() == {0, 2}
    for refused in (FLOW, FeatureRequest(stack="vlm", output=True)):
        with pytest.raises(CraftError, match="--stack vlm --mode hidden") as caught:
            features(policy, kept, refused)
        assert caught.value.exit_code == EXIT_USAGE
    ADAPTER.forget_old_weights(policy)


def test_retention_reaches_an_insulated_language_model(base: Path) -> None:
    """The actions do not train it, but their tokens do: it moves, and must be held."""
    policy = molmoact2.policy(base, enable_knowledge_insulation=True).eval()
    found = ADAPTER.features(policy, anchors(policy, processed(policy)), FLOW)
    found.hidden[2].square().sum().backward()
    for name, parameter in policy.named_parameters():
        if "transformer.blocks.0" in name:
            assert parameter.grad is not None, name


def test_a_policy_acts_by_the_weights_that_it_has_now(base: Path) -> None:
    policy = molmoact2.policy(base).eval()
    row = processed(policy, tasks=TASKS[:1], labelled=False)
    fresh = copy.deepcopy(policy)
    _act(policy, row)
    for changed in (policy, fresh):
        with torch.no_grad():
            for name, parameter in changed.named_parameters():
                if "modulation" in name:
                    parameter.mul_(2)
    expected = _act(fresh, row)
    assert (_act(policy, row) - expected).abs().max() > 0.01  # of LeRobot alone
    ADAPTER.forget_old_weights(policy)
    torch.testing.assert_close(_act(policy, row), expected, rtol=1e-4, atol=1e-5)


def _act(policy: Any, row: dict[str, Any]) -> torch.Tensor:
    chunk: torch.Tensor = policy.predict_action_chunk(
        dict(row), generator=torch.Generator().manual_seed(0)
    )
    return chunk
