"""Runs on data that the teacher's statistics do not fit: what is normalised how, and kept."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from lerobot.envs import EnvConfig
from lerobot.policies.factory import make_pre_post_processors
from numpy.typing import NDArray
from safetensors.torch import load_file
from tiny import act
from tiny.robots import spread, write_robot_data
from tiny.world import ACTIONS, ENV, STATE

from craftcli.cache.reading.reader import CacheReader
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.datasets import NEW, ensure_dataset
from craftcli.demo.world import EPISODE_STEPS, BlockWorld
from craftcli.engine.retention.anchor_dataset import AnchorDataset
from craftcli.evaluation.action_error import predict_actions
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset
from craftcli.policies.lerobot.identity import processor_digest
from craftcli.policies.lerobot.task_processors import (
    TEACHER_PROCESSORS,
    for_old_tasks,
    own_statistics,
    with_saved_teacher,
)

FRAMES = 24
GRIPPER = 2
"""The action and the number of the state that stood still in the old data."""
SMALL = ("--device", "cpu", "--batch-size", "4")


def vectors(*, gripper: bool = False, centre: float = 0.0) -> dict[str, NDArray[Any]]:
    """Vectors of a robot; the gripper stands still at 0.5 or opens and closes."""
    found = {
        "observation.state": spread(FRAMES, STATE, centre=centre, seed=1),
        "observation.environment_state": spread(FRAMES, ENV, centre=centre, seed=2),
        "action": spread(FRAMES, ACTIONS, centre=centre, seed=3),
    }
    for name in ("observation.state", "action"):
        found[name][:, GRIPPER] = np.arange(FRAMES) % 2 if gripper else 0.5
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    return {
        "old": write_robot_data(folder / "old", vectors()),
        "gripper": write_robot_data(folder / "gripper", vectors(gripper=True)),
        "far": write_robot_data(folder / "far", vectors(centre=40.0)),
    }


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Path]) -> Path:
    """A policy with the statistics of the old data, in which the gripper stood still."""
    return saved(tmp_path_factory.mktemp("teacher") / "policy", data["old"])


def saved(folder: Path, dataset: Path | None) -> Path:
    policy = act.policy(cameras=0, use_vae=False)
    # A trained policy answers with the mean where it was never shown anything else.
    with torch.no_grad():
        policy.model.action_head.weight[GRIPPER] = 0
        policy.model.action_head.bias[GRIPPER] = 0
    policy.save_pretrained(folder)
    stats = opened(dataset, policy.config).meta.stats if dataset else None
    for processor in make_pre_post_processors(policy.config, dataset_stats=stats):
        processor.save_pretrained(folder)
    return folder


def opened(dataset: Path, config: Any) -> Any:
    return open_dataset(str(dataset), root=None, policy_config=config)


@pytest.fixture
def run(
    craft: Callable[..., Any], teacher: Path, data: dict[str, Path], tmp_path: Path
) -> Callable[..., Any]:
    """Build a cache of the old data, and train on new data with these options."""
    built = craft(
        *("cache", "build", "--policy", teacher, "--dataset", data["old"], "--samples", 16),
        *("--device", "cpu", "--json"),
    )
    assert built.exit_code == 0, built.output
    assert (
        "statistics"
        not in json.loads((tmp_path / "anchors.zarr/zarr.json").read_text())["attributes"]["craft"]
    )

    def train(new: str, *more: str | Path, policy: Path = teacher, steps: int = 4) -> Any:
        return craft(
            *("train", "--policy", policy, "--dataset", data[new], "--steps", str(steps)),
            *("--anchor-batch-size", "8", "--save-every", "2", "-o", "run", *SMALL, *more),
        )

    return train


def subject(tmp_path: Path) -> Checkpoint:
    return with_saved_teacher(load_checkpoint(str(tmp_path / "run"), device="cpu"))


def batch_of(policy: Checkpoint, dataset: Path) -> dict[str, Any]:
    found: dict[str, Any] = policy.preprocess(
        read_rows(opened(dataset, policy.policy.config), list(range(FRAMES)))
    )
    return found


def losses(tmp_path: Path) -> list[float]:
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_statistics_that_fit_change_nothing(
    run: Callable[..., Any], teacher: Path, tmp_path: Path
) -> None:
    """The same data as before: one pair of processors, with the teacher's bytes."""
    ran = run("old", "--log-every", "1")
    assert ran.exit_code == 0, ran.output
    assert "Statistics" not in ran.output
    checkpoint = tmp_path / "run/checkpoints/last"
    assert not (checkpoint / TEACHER_PROCESSORS).exists()
    for file in teacher.glob("policy_*processor*.safetensors"):
        kept = load_file(checkpoint / "pretrained_model" / file.name)
        before = load_file(file)
        assert kept.keys() == before.keys()
        assert all(torch.equal(kept[name], before[name]) for name in kept)


def test_a_number_that_stood_still_gets_a_scale_and_the_old_behaviour_stays(
    run: Callable[..., Any], teacher: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    ran = run("gripper", "--log-every", "1")
    assert ran.exit_code == 0, ran.output
    said = " ".join(ran.output.split())
    assert "action: the teacher's; number 2 stood still in its data and got a scale." in said
    assert "L_ret at the teacher's weights: 0 (0 to rounding)" in said
    assert "no scale" not in said
    assert max(losses(tmp_path)) < 10

    new, old = subject(tmp_path), load_checkpoint(str(teacher), device="cpu")
    labels = batch_of(new, data["gripper"])["action"]
    assert labels.abs().max() < 5
    assert batch_of(old, data["gripper"])["action"].abs().max() > 1e6
    # One pair serves both: old frames look as before.
    assert for_old_tasks(new) is new
    before, after = batch_of(old, data["old"]), batch_of(new, data["old"])
    for name in ("observation.state", "observation.environment_state", "action"):
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-6)
    # The teacher's own weights choose the same actions on old frames through either.
    mixed = load_checkpoint(str(teacher), device="cpu")
    widened = Checkpoint(
        **{**vars(mixed), "preprocess": new.preprocess, "postprocess": new.postprocess}
    )
    chosen = [
        predict_actions(
            policy,
            AnchorDataset(opened(data["old"], policy.policy.config), policy),
            range(8),
            seed=0,
            batch_size=8,
        )
        for policy in (mixed, widened)
    ]
    torch.testing.assert_close(chosen[0], chosen[1], rtol=0, atol=1e-5)


def test_the_teachers_statistics_on_request(run: Callable[..., Any], tmp_path: Path) -> None:
    """As before this setting existed: huge labels, and a warning."""
    ran = run("gripper", "--stats", "teacher", "--log-every", "1")
    said = " ".join(ran.output.split())
    assert "number 2 stood still in the teacher's data and moves in the new" in said
    assert "--stats widen gives it a scale." in said
    assert max(losses(tmp_path)) > 1e5


def test_far_data_gets_its_own_statistics_and_the_run_keeps_both(
    run: Callable[..., Any],
    craft: Callable[..., Any],
    teacher: Path,
    data: dict[str, Path],
    tmp_path: Path,
) -> None:
    ran = run("far", "--stats", "dataset", "--log-every", "1")
    assert ran.exit_code == 0, ran.output
    said = " ".join(ran.output.split())
    assert "action: the dataset's, by --stats dataset." in said
    assert "The loss is in the dataset's deviations of the action." in said
    assert "L_ret at the teacher's weights: 0 (0 to rounding)" in said
    assert max(losses(tmp_path)) < 10

    new, old = subject(tmp_path), load_checkpoint(str(teacher), device="cpu")
    acting = for_old_tasks(new)
    assert processor_digest(acting.preprocess) == processor_digest(old.preprocess)
    assert own_statistics(acting)["action"]["mean"][0] == pytest.approx(0, abs=0.5)
    assert own_statistics(new)["action"]["mean"][0] == pytest.approx(40, abs=0.5)
    actions = torch.zeros(1, ACTIONS)
    assert new.postprocess(actions)[0, 0] == pytest.approx(40, abs=0.5)
    assert acting.postprocess(actions)[0, 0] == pytest.approx(0, abs=0.5)

    whole = craft("eval", "run", "--device", "cpu", "--json", "--samples", "8")
    assert whole.exit_code == 0, whole.output
    found = json.loads(whole.stdout)
    assert {loss["group"]: loss["mean"] < 10 for loss in found["losses"]} == {
        "old": True,
        "new": True,
    }
    assert "two sets of statistics" in " ".join(whole.stderr.split())
    # As LeRobot opens it, the old data are normalised with the new task's statistics.
    named = craft("eval", "run", "--device", "cpu", "--json", "--dataset", data["old"])
    right = craft("eval", "run", "--device", "cpu", "--json", "--old-dataset", data["old"])
    means = [json.loads(r.stdout)["losses"][0]["mean"] for r in (named, right)]
    assert means[0] > 10 > means[1]

    # Deployed with LeRobot: the teacher's files over the task's make the old task's policy.
    folder = tmp_path / "run/checkpoints/last"
    deployed = Path(shutil.copytree(folder / "pretrained_model", tmp_path / "old_task"))
    shutil.copytree(folder / TEACHER_PROCESSORS, deployed, dirs_exist_ok=True)
    copied = load_checkpoint(str(deployed), device="cpu")
    assert processor_digest(copied.preprocess) == processor_digest(old.preprocess)
    assert torch.equal(copied.postprocess(actions), acting.postprocess(actions))


class SeenFromAbove(gym.ObservationWrapper[dict[str, Any], Any, dict[str, Any]]):
    """The demo's world with LeRobot's name of its camera."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(BlockWorld(**settings))
        seen: Any = self.env.observation_space
        top = gym.spaces.Dict({"top": seen["pixels"]})
        self.observation_space: Any = gym.spaces.Dict({**seen.spaces, "pixels": top})

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {**observation, "pixels": {"top": observation["pixels"]}}


gym.register("craft_old/Red-v0", entry_point=SeenFromAbove, max_episode_steps=EPISODE_STEPS)


@EnvConfig.register_subclass("craft_old_red")
@dataclass
class RedBlock(EnvConfig):
    """The demo's world as an environment of LeRobot's, of which nobody knows that it is old."""

    task: str | None = "Red-v0"

    @property
    def package_name(self) -> str:
        return "craft_old"

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        return {"colour": "red"}


def test_an_old_environment_is_acted_in_through_the_teachers_processors(
    craft: Callable[..., Any], tmp_path: Path
) -> None:
    """The demo's teacher, all but unchanged; with the new statistics its hand does not move."""
    data = Path(shutil.copytree(ensure_dataset(NEW), tmp_path / "data"))
    file = data / "meta/stats.json"
    stats = json.loads(file.read_text())
    for bound in ("min", "max"):
        # The world rounds actions to whole cells.
        stats["action"][bound] = [0.4 * value for value in stats["action"][bound]]
    file.write_text(json.dumps(stats))
    ran = craft(
        *("train", "--policy", TEACHER_FOLDER, "--dataset", data, "--stats", "dataset"),
        *("--mode", "none", "--steps", "1", "--lr", "1e-9", "-o", "run", *SMALL),
    )
    assert ran.exit_code == 0, ran.output

    def success(source: str, option: str) -> tuple[float, list[float]]:
        """The rates of the policy and of its teacher."""
        command = ("eval", source, option, "craft_old_red", "--episodes", "4", "--device", "cpu")
        result = craft(*command, "--json", "-o", "result.json")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        (found,) = document["success"]
        assert found["group"] == ("old" if option == "--old-env" else None)
        return found["rate"], [theirs["rate"] for theirs in document["teacher_success"]]

    # The teacher beside the run acts through the same processors as the run.
    assert success("run", "--old-env") == (1.0, [1.0])
    assert success("run", "--env") == (0.0, [0.0])

    # Deployed as the README says: the teacher's processors over those of a copy.
    last = tmp_path / "run/checkpoints/last"
    deployed = Path(shutil.copytree(last / "pretrained_model", tmp_path / "old_task"))
    assert success("old_task", "--env") == (0.0, [])
    shutil.copytree(last / TEACHER_PROCESSORS, deployed, dirs_exist_ok=True)
    assert success("old_task", "--env") == (1.0, [])


def test_data_out_of_scale_get_the_datasets_statistics_by_default(
    run: Callable[..., Any], teacher: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    kept = run("far", "--stats", "teacher", "--steps", "1", "-o", "kept")
    assert "spreads from the teacher's statistics" in " ".join(kept.output.split())
    ran = run("far", "--log-every", "1")
    assert ran.exit_code == 0, ran.output
    said = " ".join(ran.output.split())
    assert "action: the dataset's, because" in said
    assert "spreads from the teacher's; old tasks keep the teacher's." in said
    assert "L_ret at the teacher's weights: 0 (0 to rounding)" in said
    assert max(losses(tmp_path)) < 10
    new, old = subject(tmp_path), load_checkpoint(str(teacher), device="cpu")
    assert batch_of(new, data["far"])["observation.state"].abs().max() < 10
    assert processor_digest(for_old_tasks(new).preprocess) == processor_digest(old.preprocess)


@pytest.mark.parametrize("mode", ["hidden+action", "replay"])
@pytest.mark.parametrize(("new", "stats"), [("gripper", "widen"), ("far", "dataset")])
def test_resuming_is_exact(
    run: Callable[..., Any],
    craft: Callable[..., Any],
    tmp_path: Path,
    new: str,
    stats: str,
    mode: str,
) -> None:
    more = ("--stats", stats, "--mode", mode, "--log-every", "1")
    assert run(new, *more).exit_code == 0
    last = tmp_path / "run/checkpoints/last"
    weights = load_file(last / "pretrained_model/model.safetensors")
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    last.unlink()
    last.symlink_to("000002")
    shutil.rmtree(tmp_path / "run/checkpoints/000004")
    resumed = craft("train", "--resume", "run")
    assert resumed.exit_code == 0, resumed.output
    again = load_file(last / "pretrained_model/model.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    kept = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in kept] == [line["loss"] for line in lines]
    assert (last / TEACHER_PROCESSORS).is_dir()


def test_a_policy_without_statistics_gets_each_datasets_own(
    craft: Callable[..., Any], data: dict[str, Path], tmp_path: Path
) -> None:
    """Base models: anchors with the old data's statistics, the task with the new data's."""
    base = saved(tmp_path / "base", None)
    common = ("--policy", base, "--device", "cpu")
    built = craft("cache", "build", *common, "--dataset", data["old"], "--samples", "16")
    assert built.exit_code == 0, built.output
    said = " ".join(built.output.split())
    assert "action: the dataset's, because the teacher's are missing." in said
    manifest = CacheReader.open(tmp_path / "anchors.zarr").manifest
    assert manifest.statistics
    assert manifest.statistics["action"]["mean"][GRIPPER] == 0.5

    task = ("--dataset", data["far"], "--anchor-batch-size", "8", "--batch-size", "4")
    tried = craft("dryrun", *common, *task, "--steps", "1")
    assert tried.exit_code == 0, tried.output
    row = "Statistics normalise the data: observation.state: the dataset's, because the teacher's"
    assert row in " ".join(tried.output.split())
    ran = craft("train", *common, *task, "--steps", "2", "-o", "run")
    assert ran.exit_code == 0, ran.output
    assert "L_ret at the teacher's weights: 0 (0 to rounding)" in ran.output
    new = subject(tmp_path)
    assert own_statistics(new)["action"]["mean"][0] == pytest.approx(40, abs=0.5)
    before = own_statistics(for_old_tasks(new))["action"]["mean"]
    assert tuple(before.tolist()) == manifest.statistics["action"]["mean"]

    evaluated = craft("eval", "run", "--device", "cpu", "--samples", "8", "--json")
    assert evaluated.exit_code == 0, evaluated.output
    found = json.loads(evaluated.stdout)
    assert found["left_out"] == []
    assert all(loss["mean"] < 10 for loss in found["losses"])
    verified = craft("cache", "inspect", "anchors.zarr", "--verify", "--policy", base)
    assert verified.exit_code == 0, verified.output

    kept = craft(
        *("train", *common, *task, "--steps", "1", "--stats", "teacher", "--mode", "none"),
        *("-o", "raw"),
    )
    assert "it stays in raw units" in " ".join(kept.output.split())


def test_a_run_without_a_cache_makes_anchors_with_the_old_datas_statistics(
    craft: Callable[..., Any], data: dict[str, Path], tmp_path: Path
) -> None:
    base = saved(tmp_path / "base", None)
    for output in ("first", "second"):
        ran = craft(
            *("train", "--policy", base, "--dataset", data["far"], "--old-dataset", data["old"]),
            *("--steps", "1", "--anchor-samples", "16", "--anchor-batch-size", "8", "-o"),
            *(f"runs/{output}", *SMALL),
        )
        assert ran.exit_code == 0, ran.output
        assert "L_ret at the teacher's weights: 0 (0 to rounding)" in ran.output
    assert "Reusing" in ran.output
    (cache,) = (tmp_path / "runs").glob("anchors-*.zarr")
    statistics = CacheReader.open(cache).manifest.statistics
    assert statistics
    assert statistics["action"]["mean"][GRIPPER] == 0.5


def test_a_dataset_of_another_size_is_refused(
    craft: Callable[..., Any], teacher: Path, tmp_path: Path
) -> None:
    wide = {**vectors(), "action": spread(FRAMES, ACTIONS + 2)}
    other = write_robot_data(tmp_path / "wide", wide)
    refused = craft(
        *("train", "--policy", teacher, "--dataset", other, "--stats", "dataset"), "--mode", "none"
    )
    assert refused.exit_code == 1
    assert "action is (5,), not (3,)" in " ".join(refused.output.split())
