"""Damaged local datasets: the error names frame and column, and nobody asks the Hub."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lerobot.datasets import dataset_metadata, lerobot_dataset
from torch.utils.data import DataLoader

from craftcli.cache.reading.reader import CacheReader
from craftcli.cli.os_errors import explain
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.errors import CraftError
from craftcli.policies.lerobot.batches import TaskBatches, read_rows
from craftcli.policies.lerobot.datasets import open_dataset, require_finite

CAMERA = "observation.images.top"
TRAIN = ("train", "--policy", TEACHER_FOLDER, "--steps", "1", "--batch-size", "2")


@pytest.fixture
def data(new_data: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(new_data.root, tmp_path / "data"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What LeRobot asked the Hub for."""
    found: list[Any] = []
    for module in (dataset_metadata, lerobot_dataset):
        for name in ("snapshot_download", "get_safe_version"):
            monkeypatch.setattr(module, name, lambda *a, **_: found.append(a))
    return found


def edit_table(root: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    (file,) = root.glob("data/**/*.parquet")
    pq.write_table(change(pq.read_table(file)), file)


def with_number(name: str, rows: list[int], value: float) -> Callable[[pa.Table], pa.Table]:
    """Put a number into a vector of these rows."""

    def change(table: pa.Table) -> pa.Table:
        column = table.column(name)
        numbers = column.combine_chunks().flatten().to_numpy().reshape(len(table), -1).copy()
        numbers[rows, 1] = value
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), numbers.shape[1])
        return table.set_column(
            table.column_names.index(name), table.field(name), vectors.cast(column.type)
        )

    return change


def without_image(row: int) -> Callable[[pa.Table], pa.Table]:
    """Replace the bytes of an image by others."""

    def change(table: pa.Table) -> pa.Table:
        values = table.column(CAMERA).to_pylist()
        values[row]["bytes"] = b"not an image"
        new = pa.array(values, type=table.column(CAMERA).type)
        return table.set_column(table.column_names.index(CAMERA), table.field(CAMERA), new)

    return change


def opened(data: Path, teacher: Any) -> Any:
    return open_dataset(str(data), root=None, policy_config=teacher.policy.config)


@pytest.mark.parametrize(
    "missing", ["meta/info.json", "meta/tasks.parquet", "meta/episodes", "data"]
)
def test_a_missing_file_is_named_and_not_asked_for(
    data: Path, teacher: Any, asked: list[Any], missing: str
) -> None:
    gone = data / missing
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(CraftError) as caught:
        opened(data, teacher)
    assert asked == []
    assert str(data) in caught.value.what
    assert missing in caught.value.why


def test_a_home_that_cannot_be_used_is_not_taken_for_a_damaged_dataset(
    data: Path, teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file/cache")
    with pytest.raises(OSError, match="Not a directory") as found:
        opened(data, teacher)
    explained = explain(found.value)
    assert explained is not None
    assert str(tmp_path / "file") in explained.what
    assert "HF_HOME" in explained.fix


@pytest.mark.parametrize("name", ["action", CAMERA])
def test_a_missing_column_is_named(data: Path, teacher: Any, name: str) -> None:
    edit_table(data, lambda table: table.drop_columns([name]))
    with pytest.raises(CraftError, match=rf"{name} has no value in 480 of 480 frames"):
        opened(data, teacher)


def test_a_bad_image_is_named_with_its_frame(data: Path, teacher: Any) -> None:
    edit_table(data, without_image(5))
    dataset = opened(data, teacher)
    with pytest.raises(CraftError) as caught:
        read_rows(dataset, [1, 5])
    assert f"Cannot read frame 5 of the dataset {data}" in caught.value.what
    assert f"the column {CAMERA} of frame 5 cannot be decoded" in caught.value.why


@pytest.mark.parametrize("workers", [0, 1])
def test_so_it_is_in_a_batch(data: Path, teacher: Any, workers: int) -> None:
    edit_table(data, without_image(5))
    batches = TaskBatches(opened(data, teacher), batch_size=512, seed=0, workers=workers)
    with pytest.raises(CraftError) as caught:
        next(iter(batches))
    assert f"the column {CAMERA} of frame 5 cannot be decoded" in caught.value.why
    assert "record or download" in caught.value.fix


def test_a_worker_that_ends_is_explained_wherever_torch_raises_it() -> None:
    found = explain(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
    assert found is not None
    assert "worker process" in found.what
    assert explain(RuntimeError("something else")) is None


@pytest.mark.parametrize("kind", [ConnectionResetError, EOFError])
def test_a_worker_that_ends_with_a_batch_on_its_way_is_explained(
    new_data: Any, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """torch passes this on if it does not know yet that the worker is gone."""

    def fail(_: int) -> NoReturn:
        raise kind("Connection reset by peer")

    monkeypatch.setattr(DataLoader, "__iter__", lambda _: map(fail, [0]))
    with pytest.raises(CraftError, match="worker process that reads the data has ended") as caught:
        next(iter(TaskBatches(new_data, batch_size=2, seed=0, workers=0)))
    assert kind.__name__ in caught.value.why


@pytest.mark.parametrize("name", ["action", "observation.state"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_not_trained_on(
    data: Path, craft: Callable[..., Any], name: str, value: float
) -> None:
    edit_table(data, with_number(name, [3, 40, 41], value))
    result = craft(*TRAIN, "--mode", "none", "--dataset", data, "--device", "cpu", "-o", "run")
    assert result.exit_code == 1, result.output
    assert "numbers that are not finite" in result.stderr
    assert f"{name} of 3 frames, the first of them 3, 40, 41" in result.stderr
    assert not Path("run").exists()


def test_a_column_that_the_policy_does_not_read_may_hold_anything(data: Path, teacher: Any) -> None:
    def change(table: pa.Table) -> pa.Table:
        times = pa.array([np.nan] * len(table), table.field("timestamp").type)
        return table.set_column(table.column_names.index("timestamp"), "timestamp", times)

    edit_table(data, change)
    require_finite(opened(data, teacher), teacher.policy.config, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [("action", np.nan), ("observation.state", np.nan), ("action", np.inf)],
)
def test_anchors_that_are_not_finite_are_marked(
    data: Path, craft: Callable[..., Any], name: str, value: float
) -> None:
    """The state becomes words and the actions tokens, so that the teacher's states are finite."""
    edit_table(data, with_number(name, [0], value))
    build = ("cache", "build", "--policy", TEACHER_FOLDER, "--dataset", data, "--device", "cpu")
    result = craft(*build, "--indices", "0,5,9", "--kind", "hidden+action")
    assert result.exit_code == 0, result.output
    assert "1 of 3 rows" in result.output
    valid = CacheReader.open(Path("anchors.zarr")).read_all("valid")
    assert valid.tolist() == [False, True, True]
