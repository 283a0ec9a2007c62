"""Rows read from the Arrow table are the same as rows read through `datasets`."""

import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from lerobot.datasets.io_utils import hf_transform_to_torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from craftcli.policies.lerobot.fast_rows import FastRows

FPS = 10
EPISODES, FRAMES = 3, 5  # of an episode each, and a part of the table
VECTORS = {"float16": 3, "float32": 4, "float64": 2, "int8": 2, "uint16": 3, "int32": 2, "bool": 2}


def frame(rng: np.random.Generator) -> dict[str, Any]:
    numbers = {
        f"observation.{dtype}": rng.uniform(0, 100, size).astype(dtype)
        for dtype, size in VECTORS.items()
    }
    return {
        **numbers,
        "observation.one": rng.normal(size=1),
        "observation.matrix": rng.normal(size=(2, 3)).astype("float32"),
        "observation.word": "yes",
        "action": rng.normal(size=2).astype("float32"),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of number that LeRobot stores, in several parts, and columns without numbers."""
    root = tmp_path_factory.mktemp("columns") / "data"
    rng = np.random.default_rng(0)
    features = {
        name: {"dtype": str(value.dtype), "shape": value.shape, "names": None}
        if isinstance(value, np.ndarray)
        else {"dtype": "string", "shape": (1,), "names": None}
        for name, value in frame(rng).items()
    }
    data = LeRobotDataset.create("me/data", FPS, features=features, root=root, use_videos=False)
    for _ in range(EPISODES):
        for _ in range(FRAMES):
            data.add_frame({**frame(rng), "task": "push"})
        data.save_episode()
    data.finalize()
    return root


def both(root: Path, **settings: Any) -> tuple[LeRobotDataset, LeRobotDataset]:
    """LeRobot's own dataset, and the same one with fast rows."""
    times = {
        "action": [0, 1 / FPS, 2 / FPS],
        "observation.float64": [-1 / FPS, 0],
        "observation.one": [0, 1 / FPS],
        "observation.matrix": [0, 1 / FPS],
    }
    theirs, ours = (
        LeRobotDataset("me/data", root=root, delta_timestamps=times, **settings) for _ in range(2)
    )
    FastRows.install(ours)
    assert isinstance(ours.hf_dataset, FastRows)
    return theirs, ours


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[name], value, rtol=0, atol=0, msg=name)
        else:
            assert ours[name] == value


@pytest.mark.parametrize("settings", [{}, {"episodes": [0, 2]}], ids=["all", "some-episodes"])
def test_rows_are_those_of_lerobot(root: Path, settings: dict[str, Any]) -> None:
    theirs, ours = both(root, **settings)
    assert len(ours) == len(theirs) == FRAMES * len(settings.get("episodes", range(EPISODES)))
    for row in range(len(theirs)):
        assert_same(ours[row], theirs[row])


def test_several_rows_and_columns_are_those_of_datasets(root: Path) -> None:
    theirs, ours = (dataset.hf_dataset for dataset in both(root))
    assert theirs.data.column("action").num_chunks == EPISODES
    for rows in ([7, 0, 7, 14], [3, -1], slice(2, 9), range(4, 6)):
        several, expected = ours[rows], theirs[rows]
        assert several.keys() == expected.keys()
        for name, values in expected.items():
            columns = (several[name], ours[name][rows], theirs[name][rows])
            for value, *mine in zip(values, *columns, strict=True):
                for other in mine:
                    assert_same({name: other}, {name: value})
    for key in (-1, np.int64(3)):
        assert_same(ours[key], theirs[key])
    assert len(ours["index"]) == len(theirs["index"])
    assert [int(row) for row in ours["index"]] == list(range(EPISODES * FRAMES))
    assert ours["index"][4] == 4


@pytest.mark.parametrize("key", [99, [99], [0, 99], -99, []], ids=str)
def test_rows_that_are_not_there_are_refused_as_datasets_does(root: Path, key: Any) -> None:
    for dataset in both(root):
        with pytest.raises(IndexError):
            dataset.hf_dataset[key]


def test_what_is_read_may_be_written_to_and_stays_apart(root: Path) -> None:
    _, ours = both(root)
    ours[3]["action"].zero_()
    ours.hf_dataset[3]["action"].zero_()
    assert ours[3]["action"].any(dim=1).all()


def test_to_workers_goes_the_dataset_not_its_numbers(root: Path) -> None:
    theirs, ours = both(root)
    sent = pickle.dumps(ours.reader)
    assert len(sent) < len(pickle.dumps(theirs.reader)) + 200
    assert_same(pickle.loads(sent).get_item(4), theirs[4])


def test_a_column_with_gaps_is_left_to_datasets() -> None:
    gaps: dict[str, list[Any]] = {
        "whole": [1.0, 2.0],
        "gap": [None, 2.0],
        "within": [[1.0, None], [1.0, 2.0]],
    }
    features = datasets.Features(
        whole=datasets.Value("float32"),
        gap=datasets.Value("float32"),
        within=datasets.Sequence(datasets.Value("float32"), length=2),
    )
    stored = datasets.Dataset.from_dict(gaps, features=features)
    columns = FastRows(stored)
    assert columns[0] == {name: values[0] for name, values in gaps.items()}
    stored.set_transform(hf_transform_to_torch)
    assert columns["gap"][[1]] == [torch.tensor(2.0)]
