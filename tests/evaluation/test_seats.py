"""Worlds stepped together: crashes are caught, reported and got over."""

import os
from functools import partial
from typing import Any

import numpy as np

from craftcli.evaluation.blocks import Blocks
from craftcli.evaluation.seats import LocalSeats, WorkerSeats
from craftcli.evaluation.simulation import Moment

STAY = np.zeros(2, dtype=np.float32)


class Fragile:
    """Crashes at its second step in the episode of seed 1."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, seed: int) -> Moment:
        self.seed, self.steps = seed, 0
        return Moment(observation={"task": ""})

    def step(self, action: Any) -> Moment:
        self.steps += 1
        if self.seed == 1 and self.steps == 2:
            raise RuntimeError("the table fell over")
        return Moment(observation={"task": ""})

    def close(self) -> None:
        pass


def test_a_crash_fails_its_episode_and_the_world_is_made_anew() -> None:
    Fragile.made = 0
    seats = LocalSeats(Fragile, 2)
    seats.reset([0, 1])
    seats.step([STAY, STAY])
    fine, crashed = seats.step([STAY, STAY])
    assert fine is not None
    assert fine.error is None
    assert crashed is not None
    assert crashed.over
    assert not crashed.success
    assert crashed.error == "RuntimeError: the table fell over"
    assert [moment.error for moment in seats.reset([2, 3])] == [None, None]
    assert Fragile.made == 3


def test_an_action_that_is_not_finite_fails_its_episode() -> None:
    seats = LocalSeats(Fragile, 1)
    seats.reset([0])
    (moment,) = seats.step([np.array([np.nan, 0])])
    assert moment is not None
    assert moment.error == "the action is not finite"


def test_processes_give_what_one_process_gives() -> None:
    make = partial(Blocks, "red", "camera")
    here, there = LocalSeats(make, 5), WorkerSeats(make, 5, workers=2)
    actions = [None, *[np.ones(2, dtype=np.float32)] * 4]
    try:
        for ours, theirs in zip(here.reset(range(5)), there.reset(range(5)), strict=True):
            assert ours.observation is not None
            assert theirs.observation is not None
            assert np.array_equal(ours.observation["camera"], theirs.observation["camera"])
        ours, theirs = here.step(actions), there.step(actions)
        assert ours[0] is None
        assert theirs[0] is None
        assert [m and m.success for m in ours] == [m and m.success for m in theirs]
    finally:
        there.close()


def test_a_process_that_dies_fails_its_episodes() -> None:
    seats = WorkerSeats(partial(os._exit, 3), 2, workers=1)
    try:
        moments = seats.reset([0, 1])
        assert [moment.over for moment in moments] == [True, True]
        assert moments[0].error == "the process that simulated it ended with code 3"
        assert len(seats.reset([2, 3])) == 2
    finally:
        seats.close()
