"""The user's day: every command of its page runs, in order and small, LeRobot's own ones too."""

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from installed import install
from lerobot_commands import LeRobotCommands
from pages import ROOT, blocks, craft_arguments
from safetensors.torch import load_file
from typer.testing import CliRunner

from craftcli.cli.app import app
from craftcli.errors import EXIT_USAGE
from craftcli.evaluation.results import Evaluation
from craftcli.policies.families.registry import register_policy_plugins

PAGE = ROOT / "examples/pages/users_day.md"
WORLD = ROOT / "examples/own_world"
PROJECT = tomllib.loads((WORLD / "pyproject.toml").read_text("utf-8"))["project"]

STEPS = {"600": "2", "1000": "4"}
"""The steps of the page, and those of the test."""
EPISODES = 20
SMALLER = {
    "python -m": ["--episodes", "3"],
    "lerobot-train --dataset": ["--batch_size=4"],
    "lerobot-eval": [f"--eval.n_episodes={EPISODES}", "--eval.batch_size=10"],
    "craft dryrun": ["--batch-size", "4", "--anchor-batch-size", "4"],
    "craft train --policy": ["--batch-size", "4", "--anchor-samples", "16"],
    "craft eval": ["--episodes", str(EPISODES)],
}
"""Options appended to every command that begins so; the last value of an option counts."""
RED = "outputs/red/checkpoints/last/pretrained_model"
ASIDE = "runs/blue/set-aside-from-000002"
REFUSED = "craft train --resume runs/blue"
INSTALLS = "uv pip install -e examples/own_world"
SAID = {
    "craft dryrun --policy": (
        "Policy and dataset fit: act",
        "Statistics normalise the data: observation.state: the teacher's. action: the teacher's.",
        "states drawn from the statistics of the policy's normaliser; no old data is needed",
        "L_ret = 0 at the teacher's weights",
    ),
    "craft train --policy": (
        "Anchors: ",
        "L_ret at the teacher's weights: ",
        "(0 to rounding)",
        "Saved runs/blue/checkpoints/",
    ),
    "craft eval runs/blue": ("Drift on", "L_ret hidden", "L_ret action", "Loss on blue (new)"),
    "craft eval runs/blue --old-env": ("table:red (old)", "table:blue", "teacher "),
    "craft inspect runs/blue": ("finished", "whole: all files match their digests"),
}
"""What the first such command says, and the page shows."""
SAID_OF_CONTINUED = {
    "craft inspect runs/blue": (
        "lerobot-train continued it from step {600} to {1000}",
        "not checked: written by lerobot-train (last)",
        "nothing held the policy to its teacher meanwhile",
    ),
    "craft eval runs/blue --old-env": ("lerobot-train has continued this run",),
    REFUSED: (
        "Cannot resume runs/blue: lerobot-train has continued it.",
        "--from {600} resumes from the last one of craft's",
    ),
    "craft train --resume runs/blue --from": ("what came after step {600} is kept in",),
}
"""The same of the first such command after `lerobot-train` has continued the run."""

NO_BRACES = str.maketrans("", "", "{}")


@dataclass(frozen=True)
class Ran:
    """A command of the page, as it is written, and what became of it."""

    command: str
    exit_code: int
    output: str


@dataclass(frozen=True)
class Day:
    """All commands of the page in order, and the folder in which they ran."""

    folder: Path
    commands: list[Ran]

    def first(self, begin: str, *, after: str = "") -> Ran:
        """The first command that begins so, after one that contains a word."""
        begun = next(i for i, ran in enumerate(self.commands) if after in ran.command)
        return next(ran for ran in self.commands[begun:] if ran.command.startswith(begin))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The world of the page, installed for this process."""
    assert INSTALLS in {" ".join(words) for words in page_commands()}
    folder = tmp_path_factory.mktemp("site")
    install(folder, PROJECT["name"])
    with pytest.MonkeyPatch.context() as patch:
        for path in (folder, WORLD):
            patch.syspath_prepend(str(path))
        register_policy_plugins.cache_clear()
        yield folder


@pytest.fixture(scope="module")
def lerobot(site: Path) -> Iterator[LeRobotCommands]:
    commands = LeRobotCommands(site, WORLD)
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def day(lerobot: LeRobotCommands, tmp_path_factory: pytest.TempPathFactory) -> Day:
    folder = tmp_path_factory.mktemp("day")
    ran = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in page_commands():
            command = " ".join(words)
            if command == INSTALLS:
                continue
            ran.append(run(command, smaller(words), lerobot, folder))
            expected = EXIT_USAGE if command == REFUSED else 0
            assert ran[-1].exit_code == expected, f"{command}\n{ran[-1].output}"
    return Day(folder=folder, commands=ran)


def page_commands() -> list[list[str]]:
    return [words for block in blocks(PAGE) if block.language == "sh" for words in block.commands]


def smaller(words: list[str]) -> list[str]:
    """The command with fewer steps and samples."""
    command = " ".join(words)
    more = [option for begin, o in SMALLER.items() if command.startswith(begin) for option in o]
    fewer = []
    for word in words:
        name, equals, value = word.rpartition("=")
        fewer.append(f"{name}{equals}{STEPS.get(value, value)}")
    return [*fewer, *more]


def run(command: str, words: list[str], lerobot: LeRobotCommands, folder: Path) -> Ran:
    arguments = craft_arguments(words)
    if arguments is None:
        finished = lerobot(words, folder)
        return Ran(command, finished.exit_code, finished.output)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return Ran(command, result.exit_code, result.output)


def one_line(text: str) -> str:
    return " ".join(text.split())


def in_test(phrase: str) -> str:
    """A phrase with the steps of the test in place of those of the page."""
    for of_page, of_test in STEPS.items():
        phrase = phrase.replace(f"{{{of_page}}}", of_test)
    return phrase


@pytest.mark.parametrize("begin", SAID)
def test_the_page_shows_what_the_commands_say(day: Day, begin: str) -> None:
    page, said = one_line(PAGE.read_text("utf-8")), one_line(day.first(begin).output)
    for phrase in SAID[begin]:
        assert phrase in said
        assert phrase in page


@pytest.mark.parametrize("begin", SAID_OF_CONTINUED)
def test_craft_recognises_the_run_that_lerobot_train_continued(day: Day, begin: str) -> None:
    page = one_line(PAGE.read_text("utf-8"))
    said = one_line(day.first(begin, after="--resume=true").output)
    for phrase in SAID_OF_CONTINUED[begin]:
        assert in_test(phrase) in said
        assert phrase.translate(NO_BRACES) in page


def test_l_ret_is_zero_to_rounding_at_the_start(day: Day) -> None:
    said = one_line(day.first("craft train --policy").output)
    found = re.search(r"L_ret at the teacher's weights: (\S+) \(0 to rounding\)", said)
    assert found is not None
    assert 0 <= float(found[1]) < 1e-9


def test_lerobot_eval_and_craft_eval_find_the_same_successes(day: Day) -> None:
    (measured,) = (
        found
        for file in (day.folder / ASIDE / "evaluations").glob("*.json")
        if (found := Evaluation.load(file)).policy.step == 2 and found.success
    )
    for success in measured.success:
        task = success.environment.removeprefix("table:")
        file = day.folder / f"outputs/eval_{task}/eval_info.json"
        (theirs,) = json.loads(file.read_text("utf-8"))["per_task"]
        assert theirs["metrics"]["successes"] == [episode.success for episode in success.episodes]
        assert len(success.episodes) == EPISODES


def test_lerobot_train_continued_with_the_state_that_craft_saved(day: Day) -> None:
    own, theirs = day.folder / "runs/blue/checkpoints/000002", day.folder / ASIDE / "000004"
    assert optimizer_steps(own) == {2}
    assert optimizer_steps(theirs) == {4}
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        both = [json.loads((f / "pretrained_model" / name).read_text()) for f in (own, theirs)]
        assert both[0] == both[1]


def test_without_retention_lerobot_train_takes_the_steps_that_craft_takes(
    day: Day, lerobot: LeRobotCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = Path(shutil.copytree(day.folder / RED, "policy"))
    # LeRobot's loader draws a random number when it starts, which moves those of dropout.
    config_file = policy / "config.json"
    settings = {**json.loads(config_file.read_text("utf-8")), "dropout": 0.0}
    config_file.write_text(json.dumps(settings), encoding="utf-8")
    data = ("--policy", "policy", "--dataset", f"{day.folder}/data/blue")
    sizes = ("--mode", "none", "--batch-size", "4", "--steps", "2", "--output", "run")
    trained = CliRunner().invoke(app, ["train", *data, *sizes], catch_exceptions=False)
    assert trained.exit_code == 0, trained.output
    shutil.copytree("run", "copy", symlinks=True)
    config = "copy/checkpoints/last/pretrained_model/train_config.json"
    words = ("lerobot-train", f"--config_path={config}", "--resume=true")
    theirs = lerobot([*words, f"--output_dir={tmp_path}/copy", "--steps=4"], tmp_path)
    assert theirs.exit_code == 0, theirs.output
    arguments = ["train", "--resume", "run", "--steps", "4"]
    own = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert own.exit_code == 0, own.output
    weights = [
        load_file(tmp_path / run / "checkpoints/000004/pretrained_model/model.safetensors")
        for run in ("run", "copy")
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def optimizer_steps(checkpoint: Path) -> set[float]:
    """The steps that the optimizer has counted for every parameter."""
    state = load_file(checkpoint / "training_state/optimizer_state.safetensors")
    return {float(value) for name, value in state.items() if name.endswith("/step")}
