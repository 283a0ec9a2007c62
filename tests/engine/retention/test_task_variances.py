"""nmse is a share of the teacher's variance within the task of a row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.stats import Moments
from craftcli.choices import Kind
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.engine.retention.task_variances import rows_by_task, spread, within_tasks

CPU = torch.device("cpu")


def opened(cache: Path) -> AnchorSet:
    reader = CacheReader.open(cache)
    return AnchorSet(reader, batch_size=4, seed=0, kinds=(Kind.HIDDEN, Kind.ACTION))


def test_rows_of_a_task_are_a_share_of_its_own_variance(
    build: Callable[..., Path], tmp_path: Path
) -> None:
    anchors = opened(build(tmp_path / "a.zarr", samples=96, kind="hidden+action"))
    tasks = anchors.reader.read_all("index/task")
    assert len(anchors.reader.tasks) == 3
    batch = anchors.read(np.arange(96), CPU)
    layer = next(iter(batch.targets))
    assert batch.mask is not None
    there = batch.mask.all(0)
    assert torch.equal(there, batch.mask.any(0))
    for task in range(3):
        own = torch.from_numpy(tasks == task)
        variance = batch.targets[layer][own].var(0, correction=0)[there].mean().item()
        assert batch.variances[layer][own].tolist() == pytest.approx([variance] * own.sum())
    assert len(batch.variances[layer].unique()) == 3


def test_a_single_task_and_rare_tasks_have_the_variance_of_all(
    build: Callable[..., Path], old_data: Any, tmp_path: Path
) -> None:
    red = np.flatnonzero(old_data.hf_dataset.data.column("task_index").to_numpy() == 0)[:16]
    chosen = ",".join(map(str, red))
    one = opened(build(tmp_path / "one.zarr", indices=chosen, kind="hidden+action"))
    few = opened(build(tmp_path / "few.zarr", samples=12, kind="hidden+action"))
    for anchors, tasks in ((one, 1), (few, 3)):
        assert len(np.unique(anchors.reader.read_all("index/task"))) == tasks
        for name, values in anchors.batch(0, CPU).variances.items():
            assert values.tolist() == pytest.approx([anchors.variances[name]] * 4)


def test_a_task_in_which_the_teacher_stands_still_does_not_count_for_all() -> None:
    still, moving = Moments(1, 2), Moments(1, 2)
    mask = np.ones((20, 1), bool)
    still.update(np.ones((20, 1, 2)), mask)
    moving.update(np.random.default_rng(0).normal(size=(20, 1, 2)), mask)
    rare = Moments(1, 2)
    rare.update(np.ones((3, 1, 2)), mask[:3])
    found = within_tasks({"still": still, "moving": moving, "rare": rare}, 5.0)
    assert found == {"still": 0.05, "moving": pytest.approx(moving.variance.mean())}


def test_large_rows_are_read_in_small_numbers() -> None:
    rows = np.arange(1000)
    assert spread(rows, 100).tolist() == rows.tolist()
    assert len(spread(rows, 2**20)) == 64
    assert len(spread(rows, 2**20, groups=2)) == 32
    assert len(spread(rows, 2**30)) == 16
    assert {0, 999} <= set(spread(rows, 2**30).tolist())
    groups = rows_by_task(np.repeat([0, 1, 2], [400, 590, 10]), rows)
    assert {task: len(own) for task, own in groups.items()} == {0: 400, 1: 590}
    assert rows_by_task(np.zeros(1000, np.intp), rows) == {}
