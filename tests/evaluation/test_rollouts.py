"""Closed-loop rollouts of the demo's teacher."""

import dataclasses
import sys
from functools import partial
from typing import Any

import pytest

from craftcli.errors import CraftError
from craftcli.evaluation.blocks import Blocks, block_environments
from craftcli.evaluation.environments import open_environments
from craftcli.evaluation.rollouts import FIRST_SEED, rollout
from craftcli.evaluation.simulation import Environment, Moment
from craftcli.evaluation.success import Success


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
    (green,) = block_environments(("green",))
    done: list[int] = []
    together = rollout(teacher, green, episodes=5, on_episodes=done.append)
    assert sum(done) == 5
    assert rollout(teacher, green, episodes=5, batch_size=2) == together


class Doomed(Blocks):
    """Crashes in the episode of the second seed."""

    def reset(self, seed: int) -> Moment:
        if seed == FIRST_SEED + 1:
            raise OSError("no more memory")
        return super().reset(seed)


def test_a_crashed_world_counts_as_failed_and_is_reported(teacher: Any) -> None:
    (red,) = block_environments(("red",))
    camera = next(iter(teacher.policy.config.image_features))
    doomed = dataclasses.replace(red, make=partial(Doomed, "red", camera))
    success = rollout(teacher, doomed, episodes=3)
    healthy = rollout(teacher, red, episodes=3)
    assert success.count == sum(healthy.episodes[i].success for i in (0, 2))
    (crashed,) = success.crashed
    assert crashed.seed == FIRST_SEED + 1
    assert crashed.error == "OSError: no more memory"
    with pytest.raises(CraftError, match="could be started"):
        rollout(teacher, doomed, episodes=1, seed=FIRST_SEED + 1)


def test_a_world_must_show_what_the_policy_reads(teacher: Any) -> None:
    blind = Environment(name="blind", make=partial(Blocks, "red", "elsewhere"), max_steps=6)
    with pytest.raises(CraftError, match="does not show what the policy reads"):
        rollout(teacher, blind, episodes=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demo:pink", "the demo has red"),
        ("metaworld:juggle-v3", "Meta-World has assembly-v3"),
        ("nowhere", "craft knows demo and metaworld"),
        ("lerobot:nowhere", "craft knows demo and metaworld"),
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
