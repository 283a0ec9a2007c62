"""Rows read again from the dataset are, bit for bit, what the teacher saw."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from craftcli.cache.reader import CacheReader
from craftcli.choices import Images
from craftcli.config import TrainConfig
from craftcli.engine.anchor_rows import open_anchor_rows
from craftcli.engine.anchors import AnchorSet
from craftcli.engine.compatibility import self_check
from craftcli.engine.opening import open_retention
from craftcli.errors import CraftError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def referring(build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("reference") / "a.zarr", images=Images.REFERENCE)


def test_both_give_the_same_batches(teacher: Any, cache: Path, referring: Path) -> None:
    settings = {"batch_size": 5, "seed": 3}
    identity = CacheReader.open(referring).manifest.dataset
    images = open_anchor_rows(identity, teacher, root=None)
    embedded = AnchorSet.open(cache, **settings)
    by_reference = AnchorSet.open(referring, **settings, images=images)
    for number in (0, 1, 2, 9, 3):  # in turn, and not: only the first comes from the thread
        one, two = embedded.batch(number, CPU), by_reference.batch(number, CPU)
        assert one.inputs.keys() == two.inputs.keys()
        for key in one.inputs:
            assert torch.equal(one.inputs[key], two.inputs[key]), key
        for layer in one.targets:
            assert torch.equal(one.targets[layer], two.targets[layer])


def test_several_readers_at_once_get_their_own_images(
    teacher: Any, cache: Path, referring: Path
) -> None:
    identity = CacheReader.open(referring).manifest.dataset
    images = open_anchor_rows(identity, teacher, root=None)
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
    assert self_check(retention).drift <= 1e-9


def test_without_the_dataset_it_says_what_is_missing(referring: Path) -> None:
    with pytest.raises(CraftError, match=r"does not hold its images.*--images embed"):
        AnchorSet.open(referring, batch_size=1, seed=0)


def test_a_dataset_that_is_gone_is_told_with_the_ways_out(
    teacher: Any, referring: Path, tmp_path: Path
) -> None:
    identity = CacheReader.open(referring).manifest.dataset
    gone = replace(identity, root=str(tmp_path / "gone"))
    with pytest.raises(CraftError, match=r"not to be had.*--anchor-root"):
        open_anchor_rows(gone, teacher, root=None)


def test_a_moved_dataset_is_found_by_the_root_given(
    teacher: Any, referring: Path, old_data: Any, tmp_path: Path
) -> None:
    moved = shutil.copytree(old_data.root, tmp_path / "moved")
    identity = CacheReader.open(referring).manifest.dataset
    gone = replace(identity, root=str(tmp_path / "gone"))
    images = open_anchor_rows(gone, teacher, root=str(moved))
    assert images.read_images([0])["observation.images.top"].shape == (1, 3, 48, 48)


def test_another_dataset_is_refused(teacher: Any, referring: Path, new_data: Any) -> None:
    identity = CacheReader.open(referring).manifest.dataset
    with pytest.raises(CraftError, match=r"is not the one.*480 frames.*720 frames"):
        open_anchor_rows(identity, teacher, root=str(new_data.root))


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
        open_anchor_rows(identity, teacher, root=str(changed))


def test_another_student_is_accepted_only_when_asked(
    student: Any, teacher: Any, cache: Path, tmp_path: Path
) -> None:
    from craftcli.policies.loading import load_checkpoint

    with torch.no_grad():
        next(student.policy.parameters()).add_(0.01)
    for part in (student.policy, student.preprocess, student.postprocess):
        part.save_pretrained(tmp_path / "other")
    other = load_checkpoint(str(tmp_path / "other"), device="cpu")
    with pytest.raises(CraftError, match=r"weights_digest.*--other-student"):
        open_retention(TrainConfig(anchor_batch_size=8), other, cache)
    config = TrainConfig(anchor_batch_size=8, other_student=True)
    assert np.isfinite(self_check(open_retention(config, other, cache)).drift)
