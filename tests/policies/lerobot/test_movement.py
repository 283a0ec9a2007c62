"""Numbers that repeat others a step later: how they are found, and that they stay together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from numpy.typing import NDArray

from craftcli.policies.lerobot.input_statistics import InputStatistics, VectorStatistics
from craftcli.policies.lerobot.movement import Movement, find_movement, read_vector

STEPS, EPISODES, NUMBERS = 60, 4, 3
STATE = "observation.state"


def walks(seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """States of a smooth walk in three numbers, and the same three a step earlier beside them."""
    rng = np.random.default_rng(seed)
    phases = rng.uniform(0, 6, size=(EPISODES, 1, NUMBERS))
    time = np.arange(STEPS + 1)[None, :, None] / 10
    now = np.sin(time + phases)
    states = np.concatenate([now[:, 1:], now[:, :-1]], axis=2)
    follows = np.ones((EPISODES, STEPS), dtype=bool)
    follows[:, 0] = False
    return states.reshape(-1, 2 * NUMBERS), follows.reshape(-1)


def vector(values: NDArray[np.float64], **changes: Any) -> VectorStatistics:
    return VectorStatistics(
        low=values.min(axis=0), high=values.max(axis=0), deviation=values.std(axis=0), **changes
    )


def movement(values: NDArray[np.float64], follows: NDArray[np.bool_]) -> Movement:
    found = vector(values).moving_as(values, follows).movement
    assert found is not None
    return found


def test_a_state_beside_its_last_one_is_found() -> None:
    values, follows = walks()
    found = movement(values, follows)
    assert found.leads.tolist() == [0, 1, 2, 0, 1, 2]
    assert found.repeats.tolist() == [False] * 3 + [True] * 3
    # sin moves by at most 0.1 a step and has a deviation of 0.71.
    assert ((found.speed > 0.05) & (found.speed < 0.15)).all()


def test_what_is_near_but_does_not_follow_is_no_repetition() -> None:
    values, follows = walks()
    # As an object that a hand is close to: the same range, but other values.
    values[:, 3] = np.roll(values[:, 0], 3)
    found = movement(values, follows)
    assert found.leads.tolist() == [0, 1, 2, 3, 1, 2]


def test_other_statistics_are_no_repetition() -> None:
    values, follows = walks()
    old = vector(values * [1, 1, 1, 2, 1, 1])
    found = old.moving_as(values, follows).movement
    assert found is not None
    assert found.leads.tolist() == [0, 1, 2, 3, 1, 2]


def test_what_stands_still_here_is_judged_by_its_statistics_alone() -> None:
    values, follows = walks()
    old = vector(values)
    values[:, [0, 3]] = 0.5
    found = old.moving_as(values, follows).movement
    assert found is not None
    assert found.leads.tolist() == [0, 1, 2, 0, 1, 2]
    assert found.speed[0] == np.median(found.speed[[1, 2, 4, 5]])


def test_a_number_that_never_moved_repeats_only_its_like() -> None:
    values, follows = walks()
    values[:, 2] = values[:, 5] = 7.0
    found = movement(values, follows)
    assert found.leads.tolist() == [0, 1, 2, 0, 1, 2]
    assert np.isfinite(found.speed).all()


def test_the_change_between_episodes_is_no_speed() -> None:
    values, follows = walks()
    jumping = find_movement(
        values,
        np.ones_like(follows),
        low=values.min(axis=0),
        high=values.max(axis=0),
        deviation=values.std(axis=0),
    )
    assert (jumping.speed > movement(values, follows).speed).all()


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_drawn_states_repeat_and_stay_in_range(seed: int, length: int) -> None:
    values, follows = walks()
    drawn = vector(values).moving_as(values, follows)
    states = drawn.draw_states(np.random.default_rng(seed), length)
    assert states.shape == (length, 2 * NUMBERS)
    assert (states >= drawn.low).all()
    assert (states <= drawn.high).all()
    # The second half of an observation is the first half of the one before it.
    np.testing.assert_allclose(states[1:, 3:], states[:-1, :3], atol=0.05)
    assert np.abs(states[:, 3:] - states[:, :3]).max() < 1


def test_without_frames_a_history_stands_still() -> None:
    values, _ = walks()
    states = vector(values).draw_states(np.random.default_rng(0), 2)
    np.testing.assert_array_equal(states[0], states[1])


@given(st.integers(0, 2**32))
def test_noise_moves_a_repetition_with_its_number(seed: int) -> None:
    values, follows = walks()
    # Nothing that repeats a number that the user wants fixed may move either.
    moving = vector(values, fixed=(1,)).moving_as(values, follows)
    noise = moving.draw_noise(np.random.default_rng(seed)) / moving.deviation
    np.testing.assert_allclose(noise[:3], noise[3:], atol=1e-9)
    assert noise[[1, 4]].tolist() == [0, 0]


@pytest.fixture
def dataset(tmp_path: Path) -> LeRobotDataset:
    values, follows = walks()
    features = {
        name: {"dtype": "float32", "shape": (size,), "names": None}
        for name, size in ((STATE, 2 * NUMBERS), ("action", 2))
    }
    made = LeRobotDataset.create(
        "me/moves", fps=10, features=features, root=tmp_path / "moves", use_videos=False
    )
    for row, (state, follow) in enumerate(zip(values, follows, strict=True)):
        if row and not follow:
            made.save_episode()
        made.add_frame(
            {STATE: state.astype(np.float32), "action": np.zeros(2, np.float32), "task": "move"}
        )
    made.save_episode()
    made.finalize()
    return LeRobotDataset("me/moves", root=tmp_path / "moves")


def test_frames_of_a_dataset_show_it(dataset: LeRobotDataset) -> None:
    values, follows = walks()
    found = read_vector(dataset, STATE)
    assert found is not None
    np.testing.assert_allclose(found[0], values, atol=1e-6)
    np.testing.assert_array_equal(found[1], follows)
    some = read_vector(dataset, STATE, [3, 4, 9])
    assert some is not None
    np.testing.assert_allclose(some[0], values[[3, 4, 9]], atol=1e-6)
    assert some[1].tolist() == [False, True, False]
    assert read_vector(dataset, "observation.environment_state") is None


def test_statistics_learn_the_movement_of_a_dataset(dataset: LeRobotDataset) -> None:
    values, _ = walks()
    known = InputStatistics(
        vectors={STATE: vector(values), "other": vector(values)},
        missing=(),
        cameras=(),
        histories={},
        action_shape=(2,),
    )
    moving = known.moving_as(dataset)
    assert moving.settings() == {"repeated": f"{STATE}:3,4,5"}
    assert moving.digest() != known.digest()
    assert moving.vectors["other"].movement is None
    assert known.settings() == {}
