"""A warning about actions that a policy cannot execute comes before it is trained on them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import make_pre_post_processors
from lerobot.processor import AbsoluteActionsProcessorStep
from tiny import act, diffusion, multi_task_dit
from tiny.world import ACTIONS, write_dataset

from craftcli.policies.lerobot.action_range import describe_out_of_reach
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint

NARROW = (-0.1, 1.0)
"""Range of the second action; the others go from -1 to 1."""


def saved(folder: Path, family: Any, *, second: tuple[float, float] = NARROW) -> Path:
    """A policy with a normaliser that knows only this range of the second action."""
    family.make(folder)
    policy = load_checkpoint(str(folder), device="cpu")
    (stats,) = [step.stats for step in policy.preprocess.steps if hasattr(step, "stats")]
    low, high = torch.tensor([[-1.0, second[0], -1.0], [1.0, second[1], 1.0]])
    own = {"min": low, "max": high, "mean": (low + high) / 2, "std": (high - low) / 2}
    processors = make_pre_post_processors(
        policy.policy.config, dataset_stats={**stats, "action": own}
    )
    for processor in processors:
        processor.save_pretrained(folder)
    return folder


class Data:
    """A real dataset with nothing but actions."""

    def __init__(self, root: Path, actions: np.ndarray[Any, Any]) -> None:
        shape = actions.shape[1:]
        features = {"action": {"dtype": "float32", "shape": shape, "names": None}}
        data = LeRobotDataset.create("me/data", 10, features=features, root=root, use_videos=False)
        for action in actions:
            data.add_frame({"action": action.astype("float32"), "task": "push"})
        data.save_episode()
        data.finalize()
        self.opened = LeRobotDataset("me/data", root=root)


@pytest.fixture
def warning(tmp_path: Path) -> Callable[..., str | None]:
    """The warning about a policy and actions; None if there is none."""

    def find(policy: Path | Checkpoint, actions: np.ndarray[Any, Any]) -> str | None:
        checkpoint = policy
        if isinstance(checkpoint, Path):
            checkpoint = load_checkpoint(str(policy), device="cpu")
        count = len(list(tmp_path.glob("data-*")))
        return describe_out_of_reach(checkpoint, Data(tmp_path / f"data-{count}", actions).opened)

    return find


def actions(*, frames: int = 40, low: float = -1.0) -> np.ndarray[Any, Any]:
    """Actions in equal steps; the second goes from `low` to 1."""
    found = np.zeros((frames, ACTIONS))
    found[:, 1] = np.linspace(low, 1, frames)
    return found


@pytest.mark.parametrize("family", [diffusion, multi_task_dit], ids=lambda f: f.__name__)
def test_clipped_actions_are_reported_with_the_range_that_is_needed(
    family: Any, warning: Callable[..., str | None], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "policy", family)
    text = warning(folder, actions())
    assert text
    # 18 of 40 are below -0.1.
    assert text.startswith("45.0% of the actions to be learned are out of the policy's reach")
    assert "it clips action 1 at -0.1 and 1, and the data go from -1 to 1." in text
    # (-1 - 0.45) / 0.55 = -2.64
    assert "config.json to 2.7 before" in text
    assert warning(folder, actions(low=-0.1)) is None

    config = folder / "config.json"
    settings = json.loads(config.read_text())
    for cure in ({"clip_sample_range": 2.7}, {"clip_sample": False}):
        config.write_text(json.dumps({**settings, **cure}))
        assert warning(folder, actions()) is None


@pytest.mark.parametrize("family", [diffusion, act], ids=lambda f: f.__name__)
def test_an_action_without_a_scale_is_reported_for_any_policy(
    family: Any, warning: Callable[..., str | None], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "policy", family, second=(0.5, 0.5))
    text = warning(folder, actions())
    assert text
    assert text.startswith("action 1 was always 0.5 in the data")
    assert "in the new data it goes from -1 to 1" in text
    assert warning(folder, actions(low=0.5) * 0 + 0.5) is None


def test_a_policy_that_clips_nothing_needs_no_warning(
    warning: Callable[..., str | None], tmp_path: Path
) -> None:
    assert warning(saved(tmp_path / "policy", act), actions()) is None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of LeRobot's statistics of inf
def test_a_stray_frame_is_not_reported_and_does_not_count(
    warning: Callable[..., str | None], tmp_path: Path
) -> None:
    policy = load_checkpoint(str(saved(tmp_path / "policy", diffusion)), device="cpu")
    stray = actions(frames=1000, low=0.0)
    stray[7, 1] = -50
    assert warning(policy, stray) is None
    broken = actions()
    broken[3, 0], broken[4, 2] = np.nan, np.inf
    text = warning(policy, broken)
    assert text
    assert "config.json to 2.7 before" in text


def test_actions_that_are_no_vectors_are_not_checked(
    warning: Callable[..., str | None], tmp_path: Path
) -> None:
    policy = load_checkpoint(str(saved(tmp_path / "policy", diffusion)), device="cpu")
    assert warning(policy, np.stack([actions()] * 2, axis=1)) is None


def test_actions_relative_to_the_state_have_no_limits(
    warning: Callable[..., str | None], tmp_path: Path
) -> None:
    policy = load_checkpoint(str(saved(tmp_path / "policy", diffusion)), device="cpu")
    assert warning(policy, actions())
    policy.postprocess.steps.append(AbsoluteActionsProcessorStep(enabled=True))
    assert warning(policy, actions()) is None


def test_train_and_dryrun_warn_and_continue(tmp_path: Path, craft: Callable[..., Any]) -> None:
    folder, data = saved(tmp_path / "policy", diffusion), write_dataset(tmp_path / "data")
    small = ("--batch-size", "2", "--device", "cpu")
    common = ("--policy", folder, "--dataset", data, "--mode", "none", "--steps", "2", *small)
    run = tmp_path / "run"
    for command in (("train", *common, "--save-every", "1", "-o", run), ("dryrun", *common)):
        result = craft(*command)
        assert result.exit_code == 0, result.output
        assert "are out of the policy's reach" in " ".join(result.stderr.split())
    (run / "checkpoints/last").unlink()
    (run / "checkpoints/last").symlink_to("000001")
    again = craft("train", "--resume", run)
    assert again.exit_code == 0, again.output
    assert "Resuming after step 1" in again.stdout
    assert "reach" not in again.stderr  # the warning came when the run began
    assert "demo" not in again.output
