"""Actions beyond where a policy cuts off are found before it is trained on them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.policies.factory import make_pre_post_processors
from tiny import act, diffusion, multi_task_dit
from tiny.world import ACTIONS, write_dataset

from craftcli.policies.action_range import describe_cut_off
from craftcli.policies.data import open_dataset
from craftcli.policies.loading import load_checkpoint

NARROW = {"min": [-1.0, -0.1, -1.0], "max": [1.0, 1.0, 1.0], "mean": [0.0] * 3, "std": [1.0] * 3}
RANGE = {name: torch.tensor(values) for name, values in NARROW.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Actions from -1 to 1."""
    return write_dataset(tmp_path_factory.mktemp("range") / "data")


def narrow(folder: Path, family: Any) -> Path:
    """A policy whose first task asked for little of the second action."""
    family.make(folder)
    policy = load_checkpoint(str(folder), device="cpu").policy
    for processor in make_pre_post_processors(policy.config, dataset_stats=_statistics(folder)):
        processor.save_pretrained(folder)
    return folder


def _statistics(folder: Path) -> dict[str, Any]:
    (step,) = [
        step
        for step in load_checkpoint(str(folder), device="cpu").preprocess.steps
        if hasattr(step, "stats")
    ]
    return {**step.stats, "action": RANGE}


def told(folder: Path, data: Path) -> str | None:
    policy = load_checkpoint(str(folder), device="cpu")
    dataset = open_dataset("me/data", root=str(data), policy_config=policy.policy.config)
    return describe_cut_off(policy, dataset)


@pytest.mark.parametrize("family", [diffusion, multi_task_dit], ids=lambda f: f.__name__)
def test_what_is_cut_off_is_told_and_how_far_the_policy_would_have_to_reach(
    family: Any, data: Path, tmp_path: Path
) -> None:
    folder = narrow(tmp_path / "policy", family)
    text = told(folder, data)
    assert text
    assert "in action 1 it cuts off at -0.1 and 1, and the data go from -0.9" in text
    # (-1 - 0.45) / 0.55 = -2.6
    needed = float(text.partition("config.json to ")[2].split()[0])
    assert 2.3 < needed <= 2.7

    config = folder / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "clip_sample_range": needed}))
    assert told(folder, data) is None
    config.write_text(json.dumps({**settings, "clip_sample": False}))
    assert told(folder, data) is None


def test_a_policy_that_cuts_nothing_off_is_left_alone(data: Path, tmp_path: Path) -> None:
    assert told(narrow(tmp_path / "policy", act), data) is None


def test_the_share_is_of_actions_not_of_numbers(data: Path, tmp_path: Path) -> None:
    folder = narrow(tmp_path / "policy", diffusion)
    dataset = open_dataset(
        "me/data",
        root=str(data),
        policy_config=load_checkpoint(str(folder), device="cpu").policy.config,
    )
    actions = torch.stack([row["action"][0] for row in map(dataset.__getitem__, range(16))])
    assert actions.shape == (16, ACTIONS)
    share = (actions[:, 1] < -0.1 - 0.02 * 0.55).float().mean().item()
    assert 0 < share < 1
    text = told(folder, data)
    assert text
    assert text.startswith(f"{share:.1%} of the actions")


def test_training_and_rehearsing_warn_and_go_on(
    data: Path, tmp_path: Path, craft: Callable[..., Any]
) -> None:
    folder = narrow(tmp_path / "policy", diffusion)
    settings = ("--policy", folder, "--dataset", data, "--mode", "none", "--steps", "1")
    common = (*settings, "--batch-size", "2", "--device", "cpu")
    for command in (("train", *common, "-o", tmp_path / "run"), ("dryrun", *common)):
        result = craft(*command)
        assert result.exit_code == 0, result.output
        assert "are out of the policy's reach" in " ".join(result.stderr.split())
