"""The sweeps of the demo run as their files say."""

import dataclasses
from pathlib import Path

import pytest

from craftcli.compare.compare import compare_runs
from craftcli.demo.world import NEW_COLOURS, OLD_COLOURS, instruction
from craftcli.policies.lerobot.instructions import read_instructions
from craftcli.sweeps.plan import plan_sweep
from craftcli.sweeps.runner import run_sweep
from craftcli.sweeps.sweep_file import ArmSpec, EvalSpec, read_sweep

FOLDER = Path(__file__).parents[2] / "examples/demo_forgetting"
SHORT = {"steps": 2, "batch_size": 4, "anchor_batch_size": 4}


def _kind(arm: ArmSpec) -> str:
    """What the test has one arm of: a point of a curve, a number of frames, instructions."""
    if "old_tasks" in arm.train:
        return "old_tasks"
    return arm.name.partition(" frames: ")[2] or arm.curve or arm.name


def _shortened(arm: ArmSpec) -> ArmSpec:
    """The arm with few anchors."""
    few = {"samples": 4, "augment": 1}
    makes = {"anchor_samples": 8} if {"old_tasks", "old_env"} & arm.train.keys() else {}
    if "old_env" in arm.train:
        makes["old_env_episodes"] = 1
    train = {**arm.train, **makes}
    if "retention_every" in train:
        # Two steps of the shortened run would have a single retention step.
        train["retention_every"] = 1
    cache = {name: few.get(name, value) for name, value in arm.cache.items()}
    return dataclasses.replace(arm, train=train, cache=cache)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.toml")), ids=lambda file: file.stem)
def test_a_little_of_every_arm(file: Path, tmp_path: Path) -> None:
    spec = read_sweep(file)
    assert len(plan_sweep(spec).runs) == 3 * len(spec.arms)
    short = dataclasses.replace(
        spec,
        output=tmp_path / "sweep",
        seeds=(0,),
        cache={**spec.cache, "samples": 8},
        train={**spec.train, **SHORT},
        eval=EvalSpec(episodes=2),
        held_out={"samples": 4},
        arms=tuple(map(_shortened, {_kind(arm): arm for arm in spec.arms}.values())),
    )
    result = run_sweep(short)
    assert result.failures == {}
    comparison = compare_runs([result.folder])
    assert all(row.estimates["old"] is not None for row in comparison.rows)
    assert comparison.plain is not None


def test_the_files_of_instructions_say_what_they_are_called() -> None:
    arms = read_sweep(FOLDER / "few_frames.toml").arms
    files = [Path(arm.train["old_tasks"]) for arm in arms if "old_tasks" in arm.train]
    found = {file.stem: read_instructions(str(FOLDER.parents[1] / file)) for file in files}
    old, new = ([instruction(c) for c in colours] for colours in (OLD_COLOURS, NEW_COLOURS))
    assert found.keys() == {"exact", "paraphrased", "one_of_three", "made_up"}
    assert list(found["exact"]) == old
    assert list(found["one_of_three"]) == old[:1]
    for name in ("paraphrased", "made_up"):
        assert not {*old, *new} & {*found[name]}
