"""Rows read again from the dataset are, bit for bit, what the teacher saw."""

import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Images, Kind
from craftcli.config.train import TrainConfig
from craftcli.engine.retention.anchor_dataset import open_anchor_dataset
from craftcli.engine.retention.anchors import AHEAD, AnchorSet
from craftcli.engine.retention.opening import open_anchors
from craftcli.engine.retention.retention import open_retention
from craftcli.engine.retention.self_check import self_check
from craftcli.errors import EXIT_CHECK_FAILED, CraftError

CPU = torch.device("cpu")
COVERED = {i * 719 // 7 for i in range(8)}
"""The rows of the dataset that its fingerprint covers."""


@pytest.fixture(scope="module")
def referring(build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("reference") / "a.zarr", images=Images.REFERENCE)


def test_both_give_the_same_batches(teacher: Any, cache: Path, referring: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 5, "seed": 3}
    identity = CacheReader.open(referring).manifest.dataset
    images = open_anchor_dataset(identity, teacher, root=None)
    embedded = AnchorSet(CacheReader.open(cache), **settings)
    by_reference = AnchorSet(CacheReader.open(referring), **settings, images=images)
    for number in (0, 1, 2, 9, 3):  # in turn, from the thread, and not
        one, two = embedded.batch(number, CPU), by_reference.batch(number, CPU)
        assert one.inputs.keys() == two.inputs.keys()
        for key in one.inputs:
            assert torch.equal(one.inputs[key], two.inputs[key]), key
        for layer in one.targets:
            assert torch.equal(one.targets[layer], two.targets[layer])


def test_the_next_batches_are_read_in_advance_and_waiting_is_counted(
    teacher: Any, referring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = CacheReader.open(referring).manifest.dataset
    images = open_anchor_dataset(identity, teacher, root=None)
    anchors = AnchorSet(CacheReader.open(referring), batch_size=2, seed=3, images=images)
    read, seen = images.read_images, threading.Semaphore(0)

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        found = read(*arguments)
        seen.release()
        return found

    monkeypatch.setattr(images, "read_images", slow)
    anchors.batch(0, CPU, following=2)
    first = anchors.waited_s
    assert first >= 0.1
    for _ in range(1 + AHEAD):  # the batch itself, and those in advance
        assert seen.acquire(timeout=60)
    for number in range(1, 1 + AHEAD):
        anchors.batch(2 * number, CPU, following=2)
    # None of these was read while its caller waited.
    assert anchors.waited_s - first < 0.1


def test_several_readers_at_once_get_their_own_images(
    teacher: Any, cache: Path, referring: Path
) -> None:
    identity = CacheReader.open(referring).manifest.dataset
    images = open_anchor_dataset(identity, teacher, root=None)
    expected = {index: images.read_images([index])["observation.images.top"] for index in range(24)}
    with ThreadPoolExecutor(max_workers=4) as threads:
        wanted = [*expected] * 8
        read = threads.map(lambda index: images.read_images([index]), wanted)
        for index, found in zip(wanted, read, strict=True):
            assert torch.equal(found["observation.images.top"], expected[index]), index


def test_the_file_is_smaller_and_names_no_image(cache: Path, referring: Path) -> None:
    whole, small = CacheReader.open(cache), CacheReader.open(referring)
    assert whole.manifest.images == "embedded"
    assert small.manifest.images == "reference"
    assert set(whole.array_names()) - set(small.array_names()) == {"inputs/observation.images.top"}
    assert small.size_on_disk() < whole.size_on_disk() - 32 * 3 * 48 * 48


def test_loss_is_zero_at_the_teachers_weights(teacher: Any, referring: Path) -> None:
    retention = open_retention(TrainConfig(anchor_batch_size=8), teacher, referring)
    check = self_check(retention.terms)
    assert check is not None
    assert check.drift <= 1e-9


def test_without_the_dataset_it_says_what_is_missing(referring: Path) -> None:
    with pytest.raises(CraftError, match=r"does not hold its images.*--images embed"):
        AnchorSet(CacheReader.open(referring), batch_size=1, seed=0)


def test_a_dataset_that_is_gone_is_an_error_with_the_ways_out(
    teacher: Any, referring: Path, tmp_path: Path
) -> None:
    identity = CacheReader.open(referring).manifest.dataset
    gone = replace(identity, root=str(tmp_path / "gone"))
    with pytest.raises(CraftError, match=r"Cannot open the dataset of the anchors.*--anchor-root"):
        open_anchor_dataset(gone, teacher, root=None)


def test_a_moved_dataset_is_found_by_the_root_given(
    teacher: Any, referring: Path, old_data: Any, tmp_path: Path
) -> None:
    moved = shutil.copytree(old_data.root, tmp_path / "moved")
    identity = CacheReader.open(referring).manifest.dataset
    gone = replace(identity, root=str(tmp_path / "gone"))
    images = open_anchor_dataset(gone, teacher, root=str(moved))
    assert images.read_images([0])["observation.images.top"].shape == (1, 3, 48, 48)


def test_another_dataset_is_refused(teacher: Any, referring: Path, new_data: Any) -> None:
    identity = CacheReader.open(referring).manifest.dataset
    with pytest.raises(CraftError, match=r"is not the one.*480 frames.*720 frames"):
        open_anchor_dataset(identity, teacher, root=str(new_data.root))


def test_a_changed_row_is_found_though_the_counts_agree(
    teacher: Any, referring: Path, old_data: Any, tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(old_data.root, tmp_path / "changed"))
    (file,) = changed.glob("data/**/*.parquet")
    table = pq.read_table(file)
    actions = table.column("action").to_pylist()
    actions[0] = [9.0, 9.0]
    column = table.schema.get_field_index("action")
    field = table.schema.field(column)
    changed_column = pa.array(actions, type=field.type)
    pq.write_table(table.set_column(column, field, changed_column), file)
    identity = CacheReader.open(referring).manifest.dataset
    with pytest.raises(CraftError, match="is not the one"):
        open_anchor_dataset(identity, teacher, root=str(changed))


def change_rows(root: Path, to: Path, name: str, rows: Iterable[int], value: Any) -> Path:
    """A copy of a dataset in which these rows have another value."""
    changed = Path(shutil.copytree(root, to))
    (file,) = changed.glob("data/**/*.parquet")
    table = pq.read_table(file)
    values = table.column(name).to_pylist()
    for row in rows:
        values[row] = value if value is not None else values[0]
    column = table.schema.get_field_index(name)
    field = table.schema.field(column)
    pq.write_table(table.set_column(column, field, pa.array(values, type=field.type)), file)
    return changed


def test_replaced_images_are_refused_by_row_and_frame(
    teacher: Any, referring: Path, old_data: Any, tmp_path: Path
) -> None:
    """The fingerprint covers eight rows: with nearly all of 720 images replaced, it is the same."""
    reader = CacheReader.open(referring)
    frames = reader.read_all("index/dataset_index")
    row, same, *_ = [row for row, frame in enumerate(frames) if frame not in COVERED]
    others = [frame for frame in range(720) if frame not in (*COVERED, frames[same])]
    root = change_rows(old_data.root, tmp_path / "b", "observation.images.top", others, None)
    opened = open_anchors(reader, teacher, kinds=[Kind.HIDDEN], anchor_root=str(root))
    with pytest.raises(CraftError, match=f"row {row} .*frame {frames[row]}, .*images") as caught:
        opened.anchors.read(np.array([row]), CPU)
    assert (caught.value.exit_code, "demo" in caught.value.what) == (EXIT_CHECK_FAILED, True)
    fine = open_anchors(reader, teacher, kinds=[Kind.HIDDEN], dataset=opened.dataset)
    fine.anchors.read(np.array([same]), CPU)


def test_replaced_labels_are_refused(
    teacher: Any, cache: Path, old_data: Any, tmp_path: Path
) -> None:
    reader = CacheReader.open(cache)
    frames = reader.read_all("index/dataset_index").tolist()
    frame = next(frame for frame in frames if frame not in COVERED)
    root = change_rows(old_data.root, tmp_path / "b", "action", [frame], [0.5, 0.25])
    opened = open_anchors(reader, teacher, kinds=[], labels=True, anchor_root=str(root))
    assert opened.dataset is not None
    with pytest.raises(CraftError, match=f"frame {frame}, .*action"):
        opened.dataset.read_labelled([frame])


def test_another_student_is_accepted_only_with_the_option(
    student: Any, teacher: Any, cache: Path, tmp_path: Path
) -> None:
    from craftcli.policies.lerobot.checkpoint import load_checkpoint

    with torch.no_grad():
        next(student.policy.parameters()).add_(0.01)
    for part in (student.policy, student.preprocess, student.postprocess):
        part.save_pretrained(tmp_path / "other")
    other = load_checkpoint(str(tmp_path / "other"), device="cpu")
    with pytest.raises(CraftError, match=r"weights_digest.*--other-student"):
        open_retention(TrainConfig(anchor_batch_size=8), other, cache)
    config = TrainConfig(anchor_batch_size=8, other_student=True)
    check = self_check(open_retention(config, other, cache).terms)
    assert check is not None
    assert np.isfinite(check.drift)
