"""A teacher that runs again over a cache finds the rows that differ from its own."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Images, StoreDtype
from craftcli.engine.retention.anchor_dataset import AnchorDataset
from craftcli.engine.retention.anchors import AnchorBatch, AnchorSet
from craftcli.evaluation.cache_check import rerun_obstacle, rerun_teacher, spread_rows


@pytest.fixture
def reader(cache: Path) -> CacheReader:
    return CacheReader.open(cache)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Change what the cache gives for one row of a layer."""
    read = AnchorSet.read

    def change(row: int, layer: str, by: float) -> None:
        def read_changed(self: AnchorSet, rows: Any, device: torch.device) -> AnchorBatch:
            batch = read(self, rows, device)
            batch.targets[layer][np.asarray(rows) == row] += by
            return batch

        monkeypatch.setattr(AnchorSet, "read", read_changed)

    return change


def test_the_teacher_still_gives_every_row(reader: CacheReader, teacher: Any) -> None:
    rows = [0, 31, 7, 8, 9, 10, 11, 12, 13, 14]
    checks = rerun_teacher(reader, teacher, rows)
    assert [check.row for check in checks] == rows
    assert all(check.passed for check in checks)
    for name in ("dataset_index", "episode", "frame"):
        stored = reader.read(f"index/{name}", np.array(rows)).tolist()
        assert [getattr(check, name) for check in checks] == stored


def test_rows_that_are_off_are_named_and_no_others(
    reader: CacheReader, teacher: Any, changed: Callable[..., None]
) -> None:
    changed(11, "vlm.3", 0.5)
    off = [check for check in rerun_teacher(reader, teacher, range(32)) if not check.passed]
    assert [(check.row, check.layer) for check in off] == [(11, "vlm.3")]
    stats = reader.stats("vlm.3")
    variance = np.average(stats.variance.mean(axis=1), weights=stats.count)
    assert off[0].drift == pytest.approx(0.25 / variance, rel=1e-3)


def test_a_state_that_is_no_number_is_off(
    reader: CacheReader, teacher: Any, changed: Callable[..., None]
) -> None:
    changed(3, "vlm.2", math.nan)
    (check,) = rerun_teacher(reader, teacher, [3])
    assert (check.layer, check.drift, check.passed) == ("vlm.2", math.inf, False)
    assert check.to_json()["drift"] is None


def test_another_policy_is_off_in_every_row(reader: CacheReader, student: Any) -> None:
    paligemma = student.policy.model.paligemma_with_expert.paligemma
    with torch.no_grad():
        paligemma.model.multi_modal_projector.linear.bias += 0.05
    assert not any(check.passed for check in rerun_teacher(reader, student, [0, 16, 31]))


@pytest.mark.parametrize("kind", ["hidden+action", "action"])
def test_another_head_is_seen_in_the_outputs(
    build: Callable[..., Path], teacher: Any, student: Any, tmp_path: Path, kind: str
) -> None:
    reader = CacheReader.open(build(tmp_path / "a.zarr", samples=4, kind=kind))
    assert rerun_obstacle(reader) is None
    assert all(check.passed for check in rerun_teacher(reader, teacher, range(4)))
    with torch.no_grad():
        student.policy.model.paligemma_with_expert.paligemma.lm_head.weight *= 1.1
    checks = rerun_teacher(reader, student, range(4))
    assert [(check.layer, check.passed) for check in checks] == [("action", False)] * 4


def test_rounding_of_the_stored_dtype_is_not_drift(
    build: Callable[..., Path], teacher: Any, tmp_path: Path
) -> None:
    path = build(tmp_path / "a.zarr", samples=8, dtype=StoreDtype.BFLOAT16)
    checks = rerun_teacher(CacheReader.open(path), teacher, range(8))
    assert all(0 < check.drift < check.tolerance == 1e-2 for check in checks)


def test_images_that_stayed_in_the_dataset_are_read_from_it(
    build: Callable[..., Path], teacher: Any, old_data: Any, tmp_path: Path
) -> None:
    path = build(tmp_path / "a.zarr", samples=4, images=Images.REFERENCE)
    reader = CacheReader.open(path)
    given = AnchorDataset(old_data, teacher)
    assert all(check.passed for check in rerun_teacher(reader, teacher, range(4), dataset=given))
    assert all(check.passed for check in rerun_teacher(reader, teacher, range(4)))


@pytest.mark.parametrize(
    ("count", "rows"), [(1, [2]), (2, [2, 9]), (4, [2, 5, 7, 9]), (99, [2, 3, 5, 6, 7, 8, 9])]
)
def test_rows_are_spread_over_the_valid_ones(count: int, rows: list[int]) -> None:
    valid = np.array([0, 0, 1, 1, 0, 1, 1, 1, 1, 1], bool)
    reader: Any = SimpleNamespace(read_all=lambda _: valid)
    assert spread_rows(reader, count) == rows


def test_what_cannot_be_run_again_is_said(
    reader: CacheReader, build: Callable[..., Path], tmp_path: Path
) -> None:
    assert rerun_obstacle(reader) is None
    lonely = CacheReader.open(build(tmp_path / "a.zarr", samples=1))
    assert "do not vary" in str(rerun_obstacle(lonely))
    labels: Any = SimpleNamespace(manifest=SimpleNamespace(kinds=("token_ce",)))
    assert "neither hidden states nor outputs" in str(rerun_obstacle(labels))
