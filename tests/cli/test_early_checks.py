"""Cheap mistakes are refused before torch and LeRobot are imported."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lerobot.envs import EnvConfig

from craftcli.cli.early_checks import check_dataset
from craftcli.errors import CraftError
from craftcli.evaluation.simulators.names import lerobots_own_kinds

MISTAKES: dict[str, str] = {
    "train --output taken": "The run taken already exists.",
    "train --output other": "Refusing to overwrite other",
    "train --resume nowhere": "Cannot resume nowhere",
    "train --resume continued": "Cannot resume continued: lerobot-train has continued it.",
    "train --resume lerobots": "Cannot resume lerobots: lerobot-train made it, not craft.",
    "train --old-env nowhere": "Unknown environment 'nowhere'.",
    "train --cache nowhere.zarr": "No cache at nowhere.zarr.",
    "train --anchors cache": "No cache at anchors.zarr.",
    "train --policy ./nobody --dataset a/b": "No policy at ./nobody.",
    "train --device abacus": "The device 'abacus' cannot be used.",
    "train --device cpu:x": "The device 'cpu:x' cannot be used.",
    "train --old-env demo:red,metaworld:fly": "Unknown environment metaworld:fly.",
    "train --eval-every 5 --eval-env nowhere": "Unknown environment 'nowhere'.",
    "train --eval-every 5 --eval-old-env nowhere": "Unknown environment 'nowhere'.",
    "train --resume taken --eval-env nowhere --eval-every 5": "Unknown environment 'nowhere'.",
    "train --policy a/b --dataset ./nowhere": "No LeRobot dataset at ./nowhere.",
    "train --policy a/b --dataset demo --dataset ~/no/data:0.3": "No LeRobot dataset at ~/no/data.",
    "train --policy a/b --dataset other": "the folder has no meta/info.json.",
    "train --policy a/b --dataset a/b --dataset-root nowhere": "No LeRobot dataset at nowhere.",
    "train --old-dataset no/such/data": "give --old-dataset a folder",
    "train --old-dataset a/b --old-dataset-root nowhere": "give --old-dataset-root the folder",
    "train --eval-every 5 --eval-dataset /no/data": "give --eval-dataset a folder",
    "train --old-tasks ./nowhere": "Cannot read the old instructions from ./nowhere.",
    "train --old-tasks old/tasks.txt": "Cannot read the old instructions from old/tasks.txt.",
    "train --old-tasks nowhere": "Cannot read the old instructions from nowhere.",
    "train --wandb.enable=true": "craft has no option --wandb.enable.",
    "dryrun --device abacus": "a check failed",
    "dryrun --old-env nowhere": "a check failed",
    "dryrun --policy a/b --dataset ./nowhere": "a check failed",
    "dryrun --old-tasks nowhere.txt": "a check failed",
    "cache build --layers first": "Cannot read the layers 'first'.",
    "cache build --layers -1,2,-1": "Layers -1, 2, -1 name a layer more than once.",
    "cache build --policy a/b --dataset ./nowhere": "No LeRobot dataset at ./nowhere.",
    "cache build --policy no/such/folder --dataset a/b": "No policy at no/such/folder.",
    "cache build --exclude nowhere.zarr": "No cache at nowhere.zarr.",
    "cache build --prompts nowhere.txt": "Cannot read the prompts nowhere.txt.",
    "cache build --env metaworld:fly": "Unknown environment metaworld:fly.",
    "cache build --output other": "it is not a craft cache",
    "eval ./nowhere": "No policy at ./nowhere.",
    "eval nowhere": "No policy at nowhere.",
    "eval runs/nowhere": "No policy at runs/nowhere.",
    "eval demo --env nowhere": "Unknown environment 'nowhere'.",
    "eval demo --old-env nowhere": "Unknown environment 'nowhere'.",
    "eval demo --env demo:pink": "Unknown environment demo:pink.",
    "eval demo --env lerobot:nowhere": "Unknown environment 'nowhere'.",
    "eval demo --dataset ./nowhere": "No LeRobot dataset at ./nowhere.",
    "eval demo --old-dataset no/such/data": "give --old-dataset a folder",
    "eval demo --cache nowhere.zarr": "No cache at nowhere.zarr.",
    "eval demo --plot drift.jpg": "drift.jpg",
    "merge nowhere": "No policy at nowhere.",
    "merge ./nowhere": "No policy at ./nowhere.",
    "merge demo --output other": "Refusing to overwrite other",
    "merge demo --teacher ./nowhere": "No policy at ./nowhere.",
}

SCRIPT = """
import json, sys
from typer.testing import CliRunner
from craftcli.cli.app import app
seen = {}
for command in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, command.split())
    heavy = sorted({"torch", "lerobot", "transformers"} & set(sys.modules))
    seen[command] = [result.exit_code, result.stderr, heavy]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The exit code, the error and the heavy imports of every mistake, made in one process."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "runs/one").mkdir(parents=True)
    (folder / "runs/one/craft_config.json").write_text("{}")
    (folder / "taken").mkdir()
    (folder / "taken/craft_config.json").write_text("{}")
    # What lerobot-train leaves as the last checkpoint of a run has no file of craft's.
    for run in ("continued", "lerobots"):
        (folder / run / "checkpoints/last/pretrained_model").mkdir(parents=True)
    (folder / "continued/craft_config.json").write_text("{}")
    (folder / "other").mkdir()
    (folder / "other/mine.txt").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(list(MISTAKES))],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("command", "what"), MISTAKES.items())
def test_a_cheap_mistake_fails_before_torch_is_imported(
    seen: dict[str, Any], command: str, what: str
) -> None:
    exit_code, stderr, heavy = seen[command]
    assert exit_code in (1, 2, 3)
    assert what in stderr
    assert heavy == []


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("eval demo --dataset me/pick", "me/pick"),
        ("eval demo --old-dataset pick", "pick"),
        ("train --policy a/b --dataset me/pick.v2", "a/b"),
        ("train --old-dataset me/old-tasks_3", "me/old-tasks_3"),
        ("train --old-tasks me/pick.v2", "me/pick.v2"),
    ],
)
def test_names_that_the_hub_may_have_are_asked_for_there(
    craft: Callable[..., Any], command: str, name: str
) -> None:
    """Without a network they fail, but later and for that reason."""
    result = craft(*command.split(), "--device", "cpu")
    assert result.exit_code != 0
    assert "HF_HUB_OFFLINE" in result.stderr
    assert name in result.stderr


def test_what_lerobot_keeps_under_a_name_with_slashes_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "me/robot/pick").mkdir(parents=True)
    with pytest.raises(CraftError, match="No LeRobot dataset at me/robot/pick"):
        check_dataset("me/robot/pick", option="--dataset")
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    check_dataset("me/robot/pick", option="--dataset")


def test_what_a_mode_does_not_read_is_not_checked(craft: Callable[..., Any]) -> None:
    """Without anchors these settings are named as unused, as before."""
    result = craft("train", "--mode", "none", "--old-env", "nowhere", "--steps", 1, "-o", "run")
    assert result.exit_code == 0
    assert "--old-env" in result.stderr


def test_the_names_of_lerobots_environments_are_those_that_it_registers() -> None:
    known = EnvConfig.get_known_choices().items()
    own = {name for name, kind in known if kind.__module__.startswith("lerobot.")}
    assert set(lerobots_own_kinds()) == own
