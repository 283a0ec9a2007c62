"""The instruction check: the same frames under other instructions."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny.act
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from craftcli.cli.app import app
from craftcli.demo.world import instruction
from craftcli.evaluation.instruction_check import (
    known_instructions,
    measure_effect,
    other_instruction,
    reason_to_skip,
)
from craftcli.evaluation.results import Evaluation, InstructionCheck, PolicyIdentity
from craftcli.evaluation.simulators.names import ALL_COLOURS
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint


def deaf(policy: Checkpoint) -> Checkpoint:
    """A policy that gets the same instruction whatever is asked."""
    own = policy.preprocess

    def preprocess(raw: dict[str, Any]) -> Any:
        return own({**raw, "task": ["go to the red block"] * len(raw["task"])})

    return dataclasses.replace(policy, preprocess=preprocess)


def test_the_demos_teacher_listens_and_a_deaf_policy_does_not(teacher: Any, old_data: Any) -> None:
    instructions = known_instructions([old_data])
    assert len(instructions) == 3
    effect = measure_effect(deaf(teacher), teacher, old_data, instructions, seed=0, samples=8)
    assert effect.frames == 8
    assert effect.policy == 0.0
    assert effect.teacher is not None
    assert effect.teacher > 0.2
    again = measure_effect(teacher, None, old_data, instructions, seed=0, samples=8)
    assert (again.policy, again.teacher) == (effect.teacher, None)


def test_every_instruction_becomes_another() -> None:
    names = ["a", "b", "c"]
    assert [other_instruction(name, names) for name in names] == ["b", "c", "a"]
    assert other_instruction("unknown", names) == "a"


def test_what_cannot_be_checked_is_said(teacher: Any, tmp_path: Path) -> None:
    assert reason_to_skip(teacher, ["a", "b"]) is None
    one = reason_to_skip(teacher, ["a"])
    assert one is not None
    assert "only one instruction" in one
    folder = tiny.act.make_state_only(tmp_path / "act")
    act = load_checkpoint(str(folder), device="cpu")
    assert reason_to_skip(act, ["a", "b"]) == "policies of type act read no instructions"


def test_files_of_earlier_versions_have_no_check() -> None:
    identity = PolicyIdentity(source="x", policy_type="x", weights_digest="w", step=None)
    checked = Evaluation(policy=identity, instructions=InstructionCheck(skipped="why"))
    document = checked.to_json()
    assert Evaluation.from_json(document) == checked
    del document["instructions"]
    assert Evaluation.from_json(document).instructions is None


def test_the_command_shows_it(craft: Callable[..., Any]) -> None:
    result = craft("eval", "demo", "--dataset", "demo", "--samples", 4)
    assert result.exit_code == 0, result.output
    assert "Change of the actions under another instruction" in result.stdout
    assert "craft-demo/old (old)" in result.stdout


OLD = (instruction("red"), instruction("green"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose anchors show the new data under old instructions: in a cache, and made live."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "old.txt").write_text("\n".join(OLD))
    sizes = "--steps 1 --batch-size 2 --anchor-batch-size 2 --device cpu"
    for name, more in (("cached", "--anchor-samples 8"), ("live", "--teacher live")):
        command = ["train", *sizes.split(), *more.split(), "--old-tasks", str(folder / "old.txt")]
        result = CliRunner().invoke(app, [*command, "-o", str(folder / name)])
        assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("name", ["cached", "live"])
def test_a_run_knows_the_old_instructions_of_its_anchors(
    runs: Path, craft: Callable[..., Any], name: str
) -> None:
    """The new data have one instruction; without the anchors' there is no other."""
    command = ("eval", runs / name, "--dataset", "craft-demo/new", "--samples", 8)
    result = craft(*command, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    check = InstructionCheck.from_json(json.loads(result.stdout)["instructions"])
    assert check.skipped is None
    (effect,) = check.effects
    assert (effect.group, effect.frames) == ("new", 8)
    assert effect.policy is not None
    assert effect.teacher is not None
    assert effect.policy > 0
    assert f"{effect.policy:.3f}  teacher {effect.teacher:.3f}" in craft(*command).stdout


def test_without_an_anchor_or_a_second_dataset_the_check_is_skipped(
    runs: Path, craft: Callable[..., Any], tmp_path: Path
) -> None:
    alone = runs / "cached/checkpoints/last/pretrained_model"
    policy = shutil.copytree(alone, tmp_path / "policy")
    result = craft("eval", policy, "--dataset", "craft-demo/new", "--samples", 2)
    assert result.exit_code == 0, result.output
    assert "Instruction check skipped: only one instruction is known" in result.stderr


def test_a_run_that_hardly_reads_its_instructions_is_warned_of(
    runs: Path, craft: Callable[..., Any], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs / "cached", tmp_path / "run", symlinks=True))
    (run / "checkpoints/last/craft_manifest.json").unlink()  # its weights are changed on purpose
    folder = run / "checkpoints/last/pretrained_model"
    read = load_checkpoint(str(folder), device="cpu")
    weights = load_file(folder / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    colours = [tokens_of(read, instruction(colour)) for colour in ALL_COLOURS]
    differing = torch.stack(colours)[:, (torch.stack(colours) != colours[0]).any(0)].unique()
    weights[name][differing] = weights[name][differing].mean(0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    result = craft("eval", run, "--dataset", "demo", "--samples", 8, "--device", "cpu")
    assert result.exit_code == 0, result.output
    warned = " ".join(result.stderr.split())
    assert "on craft-demo/old the policy hardly reads its instructions any more" in warned
    assert "another one changes its actions by 0.000, the teacher's by" in warned


def tokens_of(policy: Checkpoint, task: str) -> torch.Tensor:
    """The tokens that a policy is shown for an instruction."""
    raw = {
        "observation.state": torch.zeros(1, 2),
        "action": torch.zeros(1, 2),
        "task": [task],
    }
    tokens: torch.Tensor = policy.preprocess(raw)["observation.language.tokens"][0]
    return tokens
