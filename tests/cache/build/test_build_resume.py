"""Interrupted builds of the demo, and rows on which the teacher is not finite."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made.files import tree

from craftcli.cache.build import teacher as teacher_rows
from craftcli.cache.build.build import BuildReport, build_cache
from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Images
from craftcli.config.cache import CacheConfig
from craftcli.engine.retention.anchors import AnchorSet
from craftcli.errors import CraftError
from craftcli.policies.pooling import pool

# Four rows of the widest array, hidden states of 11 vectors in 64 float32, make a chunk.
SETTINGS: dict[str, Any] = {
    "samples": 14,
    "batch_size": 4,
    "chunk_mib": 0.011,
    "images": Images.REFERENCE,
    "device": "cpu",
}
COMMAND = ("cache", "build", "--samples", "14", "--batch-size", "4", "--chunk-mib", "0.011")

type Run = Callable[..., BuildReport]


@pytest.fixture(scope="module")
def run(teacher: Any, old_data: Any) -> Run:
    def build(output: Path, *, on_rows: Any = lambda _: None, **settings: Any) -> BuildReport:
        config = CacheConfig(**{**SETTINGS, **settings}, output=output)
        return build_cache(config, teacher, old_data, on_plan=lambda _: None, on_rows=on_rows)

    return build


@pytest.fixture(scope="module")
def undisturbed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed") / "anchors.zarr"
    assert run(path) == BuildReport(rows=14, invalid=(), reused=0)
    return path


def interrupt_after(batches: int) -> Callable[[int], None]:
    seen: list[int] = []

    def on_rows(rows: int) -> None:
        seen.append(rows)
        if len(seen) == batches:
            raise KeyboardInterrupt

    return on_rows


def test_an_interrupted_build_is_resumed_to_the_same_bytes(
    run: Run, undisturbed: Path, tmp_path: Path
) -> None:
    path = tmp_path / "anchors.zarr"
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(path, on_rows=interrupt_after(3))
    with pytest.raises(CraftError, match=r"of batch_size\."):
        run(path, resume=True, batch_size=3)
    with pytest.raises(CraftError, match=r"of dataset\.selection_digest, seed\."):
        run(path, resume=True, seed=1)
    with pytest.raises(CraftError, match=r"of rows_per_chunk\."):
        run(path, resume=True, chunk_mib=16)
    report = run(path, resume=True, on_rows=done.append)
    assert (report.reused, done) == (2, [4, 4, 4, 2])
    assert tree(path) == tree(undisturbed)


def test_the_command_says_what_it_keeps_and_goes_on(
    craft: Callable[..., Any], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = teacher_rows.TeacherRows.run, []

    def interrupted(self: Any, prepared: Any) -> Any:
        calls.append(prepared)
        # The first call only looks at one row.
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, prepared)

    with monkeypatch.context() as patch:
        patch.setattr(teacher_rows.TeacherRows, "run", interrupted)
        result = craft(*COMMAND)
    assert result.exit_code == 130
    kept = f"2 of 4 chunks in {tmp_path / 'anchors.zarr.partial'}"
    assert f"Kept {kept}: craft cache build --resume" in " ".join(result.stderr.split())
    refused = craft(*COMMAND)
    assert refused.exit_code == 1
    assert kept in refused.stderr
    assert "Loading" not in refused.stderr
    resumed = craft(*COMMAND, "--resume", "--json")
    assert resumed.exit_code == 0, resumed.output
    assert json.loads(resumed.stdout)["chunks_reused"] == 2
    assert tree(tmp_path / "anchors.zarr") == tree(undisturbed)


def test_a_full_disk_stops_the_command_with_what_is_committed(
    craft: Callable[..., Any], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zarr

    real, writes = zarr.Array.__setitem__, []

    def full(self: Any, where: Any, value: Any) -> None:
        writes.append(where)
        if writes.count(slice(8, 12)) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, where, value)

    with monkeypatch.context() as patch:
        patch.setattr(zarr.Array, "__setitem__", full)
        result = craft(*COMMAND)
    assert result.exit_code == 1
    assert "The disk is full" in result.stderr
    assert "Kept 2 of 4 chunks" in result.stderr
    assert craft(*COMMAND, "--resume").exit_code == 0
    assert tree(tmp_path / "anchors.zarr") == tree(undisturbed)


def spoil(monkeypatch: pytest.MonkeyPatch, value: float, rows: list[int], layer: int) -> None:
    """Let the teacher give `value` in one layer of some rows of every batch."""
    calls: list[int] = []

    def pooled(*arguments: Any) -> Any:
        result = pool(*arguments)
        calls.append(len(calls))
        # Two layers a batch.
        if calls[-1] % 2 == layer:
            vectors = result.vectors.clone()
            vectors[[row for row in rows if row < len(vectors)], 0, 0] = value
            return replace(result, vectors=vectors)
        return result

    monkeypatch.setattr(teacher_rows, "pool", pooled)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("layer", [0, 1])
def test_rows_that_are_not_finite_are_marked_and_reported(
    run: Run,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
    layer: int,
) -> None:
    spoil(monkeypatch, value, [1, 3], layer)
    report = run(tmp_path / "a.zarr")
    spoiled, sound = CacheReader.open(tmp_path / "a.zarr"), CacheReader.open(undisturbed)
    valid = spoiled.read_all("valid")
    assert np.flatnonzero(~valid).tolist() == [1, 3, 5, 7, 9, 11, 13]
    assert report.invalid == tuple(sound.read_all("index/dataset_index")[~valid].tolist())
    for name in ("hidden/vlm.2", "hidden/vlm.3"):
        assert not spoiled.read_all(name)[~valid].any()
        np.testing.assert_array_equal(spoiled.read_all(name)[valid], sound.read_all(name)[valid])
    assert spoiled.verify() == []


def test_invalid_rows_are_never_trained_on(
    craft: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, np.nan, [1, 3], layer=1)
    result = craft(*COMMAND, "--images", "embed", "--chunk-mib", "0.03", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["rows"], document["valid_rows"]) == (14, 7)
    assert len(document["invalid_indices"]) == 7
    first = ", ".join(map(str, document["invalid_indices"][:5]))
    warning = " ".join(result.stderr.split())
    assert "Warning: 7 of 14 rows are not finite and will not be trained on" in warning
    assert f"dataset frames {first} ..." in warning
    anchors = AnchorSet(CacheReader.open(tmp_path / "anchors.zarr"), batch_size=7, seed=0)
    assert len(anchors) == 7
    assert craft("train", "--steps", 1, "--anchor-batch-size", 7).exit_code == 0


def test_a_teacher_that_is_never_finite_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, np.nan, [0, 1, 2, 3], layer=0)
    with pytest.raises(CraftError, match="all 14 rows have NaN or infinity"):
        run(tmp_path / "a.zarr")
    assert os.listdir(tmp_path) == []
