"""Cheap mistakes are refused before torch and LeRobot are imported."""

import json
import subprocess
import sys
from typing import Any

import pytest
from lerobot.envs import EnvConfig

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
    "train --wandb.enable=true": "craft has no option --wandb.enable.",
    "dryrun --device abacus": "a check failed",
    "cache build --layers first": "Cannot read the layers 'first'.",
    "cache build --policy no/such/folder --dataset a/b": "No policy at no/such/folder.",
    "cache build --exclude nowhere.zarr": "No cache at nowhere.zarr.",
    "cache build --prompts nowhere.txt": "Cannot read the prompts nowhere.txt.",
    "cache build --env metaworld:fly": "Unknown environment metaworld:fly.",
    "cache build --output other": "it is not a craft cache",
    "eval ./nowhere": "No policy at ./nowhere.",
    "eval demo --env nowhere": "Unknown environment 'nowhere'.",
    "eval demo --old-env nowhere": "Unknown environment 'nowhere'.",
    "eval demo --env demo:pink": "Unknown environment demo:pink.",
    "eval demo --env lerobot:nowhere": "Unknown environment 'nowhere'.",
    "eval demo --cache nowhere.zarr": "No cache at nowhere.zarr.",
    "eval demo --plot drift.jpg": "drift.jpg",
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


def test_the_names_of_lerobots_environments_are_those_that_it_registers() -> None:
    known = EnvConfig.get_known_choices().items()
    own = {name for name, kind in known if kind.__module__.startswith("lerobot.")}
    assert set(lerobots_own_kinds()) == own
