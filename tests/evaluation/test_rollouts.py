"""Closed-loop rollouts of the demo's teacher."""

import dataclasses
import sys
from functools import partial
from typing import Any

import pytest

from craftcli.errors import CraftError
from craftcli.evaluation.results import Success
from craftcli.evaluation.rollouts import FIRST_SEED, rollout
from craftcli.evaluation.simulators.base import Environment, StepResult
from craftcli.evaluation.simulators.by_name import open_environments
from craftcli.evaluation.simulators.demo import DemoSimulation, demo_environments
from craftcli.policies.lerobot.checkpoint import load_checkpoint


def test_the_teacher_does_what_it_was_taught(teacher: Any) -> None:
    found = {e.name: e for e in open_environments("demo", teacher.policy.config)}
    assert [e.group for e in found.values()] == ["old", "old", "old", "new"]
    red = rollout(teacher, found["demo:red"], episodes=6)
    blue = rollout(teacher, found["demo:blue"], episodes=6)
    assert red.rate > 0.8
    assert blue.rate == 0
    assert [episode.seed for episode in red.episodes] == list(range(FIRST_SEED, FIRST_SEED + 6))
    assert red.interval[0] < red.rate <= red.interval[1]
    assert Success.from_json(red.to_json()) == red


def test_batches_and_calls_do_not_change_the_result(teacher: Any) -> None:
    (green,) = demo_environments(("green",))
    done: list[int] = []
    together = rollout(teacher, green, episodes=5, on_episodes=done.append)
    assert sum(done) == 5
    assert rollout(teacher, green, episodes=5, batch_size=2) == together


class Doomed(DemoSimulation):
    """Crashes in the episode of the second seed."""

    def reset(self, seed: int) -> StepResult:
        if seed == FIRST_SEED + 1:
            raise OSError("no more memory")
        return super().reset(seed)


def test_a_crashed_world_counts_as_failed_and_is_reported(teacher: Any) -> None:
    (red,) = demo_environments(("red",))
    camera = next(iter(teacher.policy.config.image_features))
    doomed = dataclasses.replace(red, make=partial(Doomed, "red", camera))
    success = rollout(teacher, doomed, episodes=3)
    healthy = rollout(teacher, red, episodes=3)
    assert success.count == sum(healthy.episodes[i].success for i in (0, 2))
    (crashed,) = success.crashed
    assert crashed.seed == FIRST_SEED + 1
    assert crashed.error == "OSError: no more memory"
    with pytest.raises(CraftError, match="worlds crashed at their reset"):
        rollout(teacher, doomed, episodes=1, seed=FIRST_SEED + 1)


def test_a_world_must_show_what_the_policy_reads(teacher: Any) -> None:
    blind = Environment(name="blind", make=partial(DemoSimulation, "red", "elsewhere"), max_steps=6)
    with pytest.raises(CraftError, match="lacks inputs of the policy"):
        rollout(teacher, blind, episodes=1)


def test_a_world_may_use_the_names_that_the_policy_renames(teacher: Any) -> None:
    camera = next(iter(teacher.policy.config.image_features))
    name = "observation.images.elsewhere"
    renaming = load_checkpoint(teacher.source, device="cpu", renames={name: camera})
    (red,) = demo_environments(("red",))
    other = dataclasses.replace(red, make=partial(DemoSimulation, "red", name))
    assert rollout(renaming, other, episodes=2) == rollout(teacher, red, episodes=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demo:pink", "the demo has red"),
        ("metaworld:juggle-v3", "Meta-World has assembly-v3"),
        ("nowhere", "craft has demo and metaworld"),
        ("lerobot:nowhere", "craft has demo and metaworld"),
        ("pusht", r"lerobot\[pusht\]"),
    ],
)
def test_an_unknown_or_missing_environment_says_what_there_is(
    teacher: Any, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "gym_pusht", None)
    with pytest.raises(CraftError, match=message):
        open_environments(name, teacher.policy.config)


def test_meta_world_that_is_not_installed_names_the_extra(
    teacher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "metaworld", None)
    with pytest.raises(CraftError, match=r"craftcli\[metaworld\]"):
        open_environments("metaworld:reach-v3", teacher.policy.config)
