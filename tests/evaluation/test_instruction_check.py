"""The instruction check: the same frames under other instructions."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny.act

from craftcli.evaluation.instruction_check import (
    known_instructions,
    measure_effect,
    other_instruction,
    reason_to_skip,
)
from craftcli.evaluation.results import Evaluation, InstructionCheck, PolicyIdentity
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
