"""Base models as they are published, fine-tuned on other robots: batches as `lerobot-train`'s."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from lerobot.policies.factory import make_pre_post_processors
from lerobot.scripts import lerobot_train
from tiny.base_models import BASE_MODELS, BaseModel
from tiny.robots import spread, write_robot_data

from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.run import open_policy_and_data
from craftcli.policies.families.registry import adapter_for
from craftcli.policies.lerobot.batches import read_rows

FRAMES = 12
BATCHES = 2
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


class EnoughError(Exception):
    """All batches have been seen."""


@dataclass
class LeRobotTrain:
    """What `lerobot-train --policy.path` makes of a base model and a robot's data."""

    policy: Any = None
    postprocess: Any = None
    batches: list[dict[str, Any]] = field(default_factory=list)
    """As its policy gets them."""

    def run(self, patch: pytest.MonkeyPatch, *arguments: str) -> None:
        """Start the real command, and stop it when its policy would learn from the last batch."""

        def processors(policy_cfg: Any, **settings: Any) -> tuple[Any, Any]:
            # pi0_fast: LeRobot forgets the names of local tokenizers.
            names = adapter_for(policy_cfg.type).processor_overrides(policy_cfg)
            settings["preprocessor_overrides"] |= names
            made = make_pre_post_processors(policy_cfg=policy_cfg, **settings)
            self.postprocess = made[1]
            return made

        def update(metrics: Any, policy: Any, batch: dict[str, Any], *_: Any, **__: Any) -> Any:
            self.policy = policy
            self.batches.append(batch)
            if len(self.batches) == BATCHES:
                raise EnoughError
            return metrics, {}

        patch.setattr(lerobot_train, "make_pre_post_processors", processors)
        patch.setattr(lerobot_train, "update_policy", update)
        # It logs to the terminal from now on, which is nothing to leave behind.
        patch.setattr(lerobot_train, "init_logging", lambda **_: None)
        patch.setattr("sys.argv", ["lerobot-train", *arguments])
        try:
            with pytest.raises(EnoughError):
                lerobot_train.train()
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("robot", ROBOTS)
def test_the_policy_sees_and_learns_what_lerobot_train_shows_it(
    base: tuple[BaseModel, Path],
    data: dict[str, Path],
    robot: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, folder = base
    theirs = LeRobotTrain()
    theirs.run(
        monkeypatch,
        f"--policy.path={folder}",
        "--policy.device=cpu",
        "--policy.push_to_hub=false",
        f"--dataset.repo_id={robot}",
        f"--dataset.root={data[robot]}",
        f"--rename_map={json.dumps(renames(model))}",
        f"--output_dir={tmp_path / 'theirs'}",
        "--batch_size=3",
        "--num_workers=0",
    )
    config = TrainConfig(
        policy=str(folder), dataset=str(data[robot]), rename=as_option(model), device="cpu"
    )
    run = open_policy_and_data(config, tmp_path / "run", Processes.from_environment())
    for batch in theirs.batches:
        ours = run.student.preprocess(read_rows(run.dataset, batch["index"].tolist()))
        read = [key for key, value in batch.items() if isinstance(value, torch.Tensor)]
        assert {"action", "observation.state", *model.cameras[:2]} <= set(read)
        for key in read:
            assert torch.equal(ours[key], batch[key]), key
        assert ours["action"].abs().max() < 4  # and not in degrees

        losses = []
        for policy, seen in ((run.student.policy, ours), (theirs.policy, batch)):
            policy.eval()
            torch.manual_seed(0)
            with torch.no_grad():
                losses.append(policy(seen)[0].item())
        assert losses[0] == losses[1]
    # Predicted actions become actions of this robot.
    predicted = torch.zeros(1, ROBOTS[robot])
    assert torch.equal(run.student.postprocess(predicted), theirs.postprocess(predicted))


@pytest.mark.parametrize(("old", "new"), [("six", "fourteen"), ("fourteen", "six")])
def test_four_commands_from_one_robot_to_another(
    base: tuple[BaseModel, Path],
    data: dict[str, Path],
    craft: Callable[..., Any],
    tmp_path: Path,
    old: str,
    new: str,
) -> None:
    model, folder = base
    common = ("--policy", folder, "--rename", as_option(model), "--device", "cpu")
    built = craft("cache", "build", *common, "--dataset", data[old], "--samples", "4")
    assert built.exit_code == 0, built.output
    said = " ".join(built.output.split())
    why = "are inert" if model.name.endswith("inert") else "are missing"
    assert f"action: the dataset's, because the teacher's {why}" in said
    if model.name == "smolvla_base":
        assert "The teacher's normaliser knows so100-blue.buffer.action, so100-red" in said

    sizes = ("--batch-size", "2", "--anchor-batch-size", "4", "--steps", "1")
    task = (*common, "--dataset", data[new], *sizes)
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
    assert config["output_features"]["action"]["shape"] == [ROBOTS[new]]

    evaluated = craft("eval", "run", "--device", "cpu", "--samples", "2", "--json")
    assert evaluated.exit_code == 0, evaluated.output
    found = json.loads(evaluated.stdout)
    assert found["left_out"] == []
    assert {loss["group"] for loss in found["losses"]} == {"old", "new"}
    # One step has hardly changed it: the teacher's loss counts the same numbers of an action.
    for own, theirs in zip(found["losses"], found["teacher_losses"], strict=True):
        assert own["mean"] == pytest.approx(theirs["mean"], rel=0.02)
    assert found["drift"]["rows"] == 4
