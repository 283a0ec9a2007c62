"""Base models as they are published, fine-tuned on other robots: batches as `lerobot-train`'s."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import make_policy, make_pre_post_processors
from tiny.base_models import BASE_MODELS, BaseModel
from tiny.robots import spread, write_robot_data
from torch.utils.data import default_collate

from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.run import open_policy_and_data
from craftcli.policies.families.registry import adapter_for
from craftcli.policies.lerobot.batches import read_rows

FRAMES = 12
ROBOTS = {"six": 6, "fourteen": 14}
"""Numbers of the state and the action of two robots."""
CAMERAS = ("observation.images.top", "observation.images.hand")
"""Their cameras: other names than the policies', and one fewer."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    return {
        name: write_robot_data(
            folder / name,
            {
                "observation.state": spread(FRAMES, size, centre=30, width=20, seed=1),
                "action": spread(FRAMES, size, centre=30, width=20, seed=2),
            },
            cameras=CAMERAS,
        )
        for name, size in ROBOTS.items()
    }


@pytest.fixture(scope="module", params=BASE_MODELS, ids=lambda base: base.name)
def base(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[BaseModel, Path]:
    model: BaseModel = request.param
    return model, model.make(tmp_path_factory.mktemp(model.name) / "policy")


def renames(model: BaseModel) -> dict[str, str]:
    return dict(zip(CAMERAS, model.cameras, strict=False))


def as_option(model: BaseModel) -> str:
    return ",".join(f"{old}={new}" for old, new in renames(model).items())


class LeRobotTrain:
    """The policy and the processors that `lerobot-train --policy.path` makes, step by step."""

    def __init__(self, folder: Path, dataset: LeRobotDataset, rename_map: dict[str, str]) -> None:
        config = PreTrainedConfig.from_pretrained(str(folder))
        config.device, config.pretrained_path = "cpu", folder
        self.policy: Any = make_policy(config, ds_meta=dataset.meta, rename_map=rename_map)
        features = {**config.input_features, **config.output_features}
        normalize = {
            "stats": dataset.meta.stats,
            "features": features,
            "norm_map": config.normalization_mapping,
        }
        self.preprocess, self.postprocess = make_pre_post_processors(
            policy_cfg=config,
            pretrained_path=str(folder),
            preprocessor_overrides={
                # pi0_fast: LeRobot forgets the names of local tokenizers.
                **adapter_for(config.type).processor_overrides(config),
                "device_processor": {"device": "cpu"},
                "normalizer_processor": normalize,
                "rename_observations_processor": {"rename_map": rename_map},
            },
            postprocessor_overrides={
                "unnormalizer_processor": {**normalize, "features": config.output_features}
            },
        )


@pytest.mark.parametrize("robot", ROBOTS)
def test_the_policy_sees_and_learns_what_lerobot_train_shows_it(
    base: tuple[BaseModel, Path], data: dict[str, Path], robot: str, tmp_path: Path
) -> None:
    model, folder = base
    config = TrainConfig(
        policy=str(folder), dataset=str(data[robot]), rename=as_option(model), device="cpu"
    )
    run = open_policy_and_data(config, tmp_path / "run", Processes.from_environment())
    rows = [0, 3, 7]
    ours = run.student.preprocess(read_rows(run.dataset, rows))

    dataset = LeRobotDataset(robot, root=data[robot], delta_timestamps=run.dataset.delta_timestamps)
    theirs_run = LeRobotTrain(folder, dataset, renames(model))
    theirs = theirs_run.preprocess(default_collate([dataset[row] for row in rows]))
    read = [key for key, value in theirs.items() if isinstance(value, torch.Tensor)]
    assert {"action", "observation.state", *model.cameras[:2]} <= set(read)
    for key in read:
        assert torch.equal(ours[key], theirs[key]), key
    assert ours["action"].abs().max() < 4  # and not in degrees

    losses = []
    for policy, batch in ((run.student.policy, ours), (theirs_run.policy, theirs)):
        policy.eval()
        torch.manual_seed(0)
        with torch.no_grad():
            losses.append(policy(batch)[0].item())
    assert losses[0] == losses[1]
    # Predicted actions become actions of this robot.
    predicted = torch.zeros(1, ROBOTS[robot])
    assert torch.equal(run.student.postprocess(predicted), theirs_run.postprocess(predicted))


def test_four_commands_from_one_robot_to_another(
    base: tuple[BaseModel, Path],
    data: dict[str, Path],
    craft: Callable[..., Any],
    tmp_path: Path,
) -> None:
    model, folder = base
    common = ("--policy", folder, "--rename", as_option(model), "--device", "cpu")
    built = craft("cache", "build", *common, "--dataset", data["six"], "--samples", "4")
    assert built.exit_code == 0, built.output
    said = " ".join(built.output.split())
    why = "are inert" if model.name.endswith("inert") else "are missing"
    assert f"action: the dataset's, because the teacher's {why}" in said
    if model.name == "smolvla_base":
        assert "The teacher's normaliser knows so100-blue.buffer.action, so100-red" in said

    sizes = ("--batch-size", "2", "--anchor-batch-size", "4", "--steps", "1")
    task = (*common, "--dataset", data["fourteen"], *sizes)
    tried = craft("dryrun", *task, "--json")
    assert tried.exit_code == 0, tried.output
    statistics = json.loads(tried.stdout)["checks"][1]["detail"]
    assert statistics.startswith("observation.state: the dataset's, because")
    ran = craft("train", *task, "-o", "run")
    assert ran.exit_code == 0, ran.output
    assert "L_ret at the teacher's weights: 0 (0 to rounding)" in ran.output
    config = json.loads(
        (tmp_path / "run/checkpoints/last/pretrained_model/config.json").read_text()
    )
    assert config["output_features"]["action"]["shape"] == [14]

    evaluated = craft("eval", "run", "--device", "cpu", "--samples", "2", "--json")
    assert evaluated.exit_code == 0, evaluated.output
    found = json.loads(evaluated.stdout)
    assert found["left_out"] == []
    assert {loss["group"] for loss in found["losses"]} == {"old", "new"}
    # One step has hardly changed it: the teacher's loss counts the same numbers of an action.
    for own, theirs in zip(found["losses"], found["teacher_losses"], strict=True):
        assert own["mean"] == pytest.approx(theirs["mean"], rel=0.02)
    assert found["drift"]["rows"] == 4
