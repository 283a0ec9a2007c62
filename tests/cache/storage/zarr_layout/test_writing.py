"""Rows and arrays that do not fit the manifest are refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made.manifests import make_manifest
from made.rows import Rows
from made.small_cache import TASKS, make_arrays, make_rows

from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.writing.writer import CacheWriter
from craftcli.errors import CraftError


def broken_rows(change: Callable[[Rows], Any]) -> Rows:
    rows = make_rows(make_manifest(rows=4))
    rows["valid"][:] = True
    rows["hidden_mask"][:] = True
    change(rows)
    return rows


def set_hidden(value: float) -> Callable[[Rows], None]:
    return lambda rows: rows["hidden/vlm.3"].__setitem__((1, 0, 0), value)


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        (lambda rows: rows.pop("valid"), ValueError, "missing or unknown: valid"),
        (lambda rows: rows.update(more=rows["valid"]), ValueError, "missing or unknown: more"),
        (lambda rows: rows.update(valid=rows["valid"][:3]), ValueError, "valid must be bool"),
        (lambda rows: rows.update(valid=rows["valid"].astype("u1")), ValueError, "got uint8"),
        (lambda rows: rows["index/task"].fill(2), ValueError, "beyond the 2 tasks"),
        (set_hidden(np.nan), CraftError, "row 1 of layer vlm.3"),
        (set_hidden(np.inf), CraftError, "row 1 of layer vlm.3"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[Rows], Any], error: type[Exception], problem: str
) -> None:
    manifest = make_manifest(rows=4)
    arrays, path = make_arrays(manifest), tmp_path / "a.zarr"
    writer = CacheWriter.create(path, manifest, arrays, tasks=TASKS, overwrite=False)
    with pytest.raises(error, match=problem), writer:
        writer.write_chunk(0, broken_rows(change))
    assert os.listdir(tmp_path) == []


def test_chunks_are_written_once_and_all(tmp_path: Path) -> None:
    manifest = make_manifest()
    rows = {name: values[:4] for name, values in make_rows(manifest).items()}
    arrays, path = make_arrays(manifest), tmp_path / "a.zarr"
    with CacheWriter.create(path, manifest, arrays, tasks=TASKS, overwrite=False) as writer:
        writer.write_chunk(0, rows)
        with pytest.raises(ValueError, match="already committed"):
            writer.write_chunk(0, rows)
        with pytest.raises(ValueError, match="2 of 3 chunks are not written"):
            writer.finish()
        with pytest.raises(IndexError):
            writer.write_chunk(3, rows)


@pytest.mark.parametrize(
    ("name", "spec", "problem"),
    [
        ("valid", ArraySpec(shape=(), dtype="int8"), "valid must be"),
        ("commit", ArraySpec(shape=(), dtype="int8"), "craft writes itself"),
        ("stats/x", ArraySpec(shape=(), dtype="int8"), "craft writes itself"),
        ("hidden/vlm.0", ArraySpec(shape=(2, 3), dtype="float32"), "not in the manifest"),
        ("inputs/../x", ArraySpec(shape=(), dtype="int8"), "no array name"),
    ],
)
def test_arrays_must_fit_the_manifest(
    tmp_path: Path, name: str, spec: ArraySpec, problem: str
) -> None:
    manifest = make_manifest()
    arrays = make_arrays(manifest) | {name: spec}
    with pytest.raises(ValueError, match=problem):
        CacheWriter.create(tmp_path / "a.zarr", manifest, arrays, tasks=TASKS, overwrite=False)
    assert os.listdir(tmp_path) == []
