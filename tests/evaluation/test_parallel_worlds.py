"""Worlds that step together: a crash is caught and reported, and the world is made again."""

import os
from functools import partial
from typing import Any

import numpy as np

from craftcli.evaluation.parallel_worlds import LocalWorlds, WorkerWorlds
from craftcli.evaluation.simulators.base import StepResult
from craftcli.evaluation.simulators.demo import DemoSimulation

STAY = np.zeros(2, dtype=np.float32)


class Fragile:
    """Crashes at its second step in the episode of seed 1."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, seed: int) -> StepResult:
        self.seed, self.steps = seed, 0
        return StepResult(observation={"task": ""})

    def step(self, action: Any) -> StepResult:
        self.steps += 1
        if self.seed == 1 and self.steps == 2:
            raise RuntimeError("the table fell over")
        return StepResult(observation={"task": ""})

    def close(self) -> None:
        pass


def test_a_crash_fails_its_episode_and_the_world_is_made_anew() -> None:
    Fragile.made = 0
    worlds = LocalWorlds(Fragile, 2)
    worlds.reset([0, 1])
    worlds.step([STAY, STAY])
    fine, crashed = worlds.step([STAY, STAY])
    assert fine is not None
    assert fine.error is None
    assert crashed is not None
    assert crashed.over
    assert not crashed.success
    assert crashed.error == "RuntimeError: the table fell over"
    assert [moment.error for moment in worlds.reset([2, 3])] == [None, None]
    assert Fragile.made == 3


def test_an_action_that_is_not_finite_fails_its_episode() -> None:
    worlds = LocalWorlds(Fragile, 1)
    worlds.reset([0])
    (moment,) = worlds.step([np.array([np.nan, 0])])
    assert moment is not None
    assert moment.error == "the action is not finite"


def test_processes_give_what_one_process_gives() -> None:
    make = partial(DemoSimulation, "red", "camera")
    here, there = LocalWorlds(make, 5), WorkerWorlds(make, 5, workers=2)
    actions = [None, *[np.ones(2, dtype=np.float32)] * 4]
    try:
        for ours, theirs in zip(here.reset(range(5)), there.reset(range(5)), strict=True):
            assert ours.observation is not None
            assert theirs.observation is not None
            assert np.array_equal(ours.observation["camera"], theirs.observation["camera"])
        local, remote = here.step(actions), there.step(actions)
        assert local[0] is None
        assert remote[0] is None
        assert [r and r.success for r in local] == [r and r.success for r in remote]
    finally:
        there.close()


def test_a_process_that_dies_fails_its_episodes() -> None:
    worlds = WorkerWorlds(partial(os._exit, 3), 2, workers=1)
    try:
        moments = worlds.reset([0, 1])
        assert [moment.over for moment in moments] == [True, True]
        assert moments[0].error == "the process that simulated it ended with code 3"
        assert len(worlds.reset([2, 3])) == 2
    finally:
        worlds.close()
