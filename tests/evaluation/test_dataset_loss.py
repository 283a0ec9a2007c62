"""A policy's own loss on data."""

from typing import Any

import numpy as np
import pytest
import torch

from craftcli.evaluation.dataset_loss import choose_frames, dataset_loss
from craftcli.evaluation.results import DatasetLoss


def test_old_data_fits_the_teacher_better_than_new(
    teacher: Any, old_data: Any, new_data: Any
) -> None:
    frames: list[int] = []
    old = dataset_loss(teacher, old_data, seed=3, group="old", samples=24, on_frames=frames.append)
    new = dataset_loss(teacher, new_data, seed=3, group="new", samples=8)
    assert sum(frames) == old.frames == 24
    assert len(old.by_task) == 3
    assert list(new.by_task) == ["reach the blue block"]
    assert old.mean < new.mean
    assert new.mean == new.by_task["reach the blue block"]
    assert min(old.by_task.values()) <= old.mean <= max(old.by_task.values())
    assert DatasetLoss.from_json(old.to_json()) == old


def test_the_same_frames_give_the_same_and_leave_the_random_state_alone(
    teacher: Any, old_data: Any
) -> None:
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    first = dataset_loss(teacher, old_data, seed=0, samples=6)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert dataset_loss(teacher, old_data, seed=0, samples=6) == first
    pieces = dataset_loss(teacher, old_data, seed=0, samples=6, batch_size=1)
    assert pieces.mean == pytest.approx(first.mean, rel=0.2)


def test_no_frame_comes_twice_and_all_come_if_asked_for(teacher: Any, old_data: Any) -> None:
    chosen = choose_frames(teacher, old_data, seed=0, samples=10**6)
    assert np.array_equal(chosen, np.arange(len(old_data)))
    some = choose_frames(teacher, old_data, seed=0, samples=50)
    assert len(np.unique(some)) == 50
