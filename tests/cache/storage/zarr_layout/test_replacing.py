"""What was at a path stays until something whole can take its place."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from made.manifests import make_manifest
from made.small_cache import TASKS, make_arrays, make_rows, write

from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.writing.writer import CacheWriter
from craftcli.errors import CraftError


def tree(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_an_existing_cache_is_replaced_only_when_asked(cache: Path) -> None:
    manifest, before = make_manifest(seed=1), tree(cache)
    with pytest.raises(CraftError, match="--overwrite") as caught:
        write(cache, manifest, make_rows(manifest))
    assert caught.value.exit_code == 1
    assert tree(cache.parent) == before
    rows = make_rows(manifest, seed=1)
    write(cache, manifest, rows, overwrite=True)
    reader = CacheReader.open(cache)
    assert reader.manifest.seed == 1
    np.testing.assert_array_equal(reader.read_all("hidden/vlm.2"), rows["hidden/vlm.2"])
    assert os.listdir(cache.parent) == [cache.name]


def test_an_open_reader_keeps_what_it_read_over_an_overwrite(cache: Path) -> None:
    reader = CacheReader.open(cache)
    before = reader.read_all("hidden/vlm.2")
    write(cache, make_manifest(), make_rows(make_manifest(), seed=1), overwrite=True)
    np.testing.assert_array_equal(reader.read_all("hidden/vlm.2"), before)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("kind", ["folder", "empty", "group", "file", "link"])
def test_what_is_not_a_cache_is_never_replaced(tmp_path: Path, kind: str, overwrite: bool) -> None:
    path = tmp_path / "precious"
    if kind == "folder":
        path.mkdir()
        (path / "photo.jpg").write_text("me")
    elif kind == "empty":
        path.mkdir()
    elif kind == "group":
        zarr.create_group(path, attributes={"title": "mine"})
    elif kind == "file":
        path.write_text("me")
    else:
        (tmp_path / "home").mkdir()
        path.symlink_to(tmp_path / "home")
    before = tree(tmp_path)
    manifest = make_manifest()
    with pytest.raises(CraftError, match="not a craft cache"):
        write(path, manifest, make_rows(manifest), overwrite=overwrite)
    assert tree(tmp_path) == before


def test_a_linked_cache_is_replaced_where_it_is(cache: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.zarr"
    link.symlink_to(cache)
    write(link, make_manifest(seed=1), make_rows(make_manifest()), overwrite=True)
    assert link.is_symlink()
    assert CacheReader.open(cache).manifest.seed == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("exists", [True, False])
def test_a_failed_build_leaves_everything_as_it_was(
    tmp_path: Path, error: type[BaseException], exists: bool
) -> None:
    path, manifest = tmp_path / "a.zarr", make_manifest()
    rows = make_rows(manifest)
    if exists:
        write(path, manifest, rows)
    before = tree(tmp_path)

    def build() -> None:
        arrays = make_arrays(manifest)
        with CacheWriter.create(path, manifest, arrays, tasks=TASKS, overwrite=True) as writer:
            writer.write_chunk(0, {name: values[:4] for name, values in rows.items()})
            raise error

    with pytest.raises(error):
        build()
    assert tree(tmp_path) == before
    assert os.listdir(tmp_path) == (["a.zarr"] if exists else [])


def test_leaving_without_finish_keeps_nothing(tmp_path: Path) -> None:
    manifest = make_manifest()
    arrays = make_arrays(manifest)
    with CacheWriter.create(tmp_path / "a", manifest, arrays, tasks=TASKS, overwrite=False):
        pass
    assert os.listdir(tmp_path) == []


def test_an_overwrite_killed_between_its_moves_is_undone(cache: Path) -> None:
    aside = cache.with_name(f".{cache.name}.0123456789abcdef.replaced")
    before = {name.replace(cache.name, aside.name): data for name, data in tree(cache).items()}
    cache.rename(aside)
    assert tree(aside) == before
    with pytest.raises(CraftError, match="the old one is"):
        CacheReader.open(cache)
    with pytest.raises(CraftError, match="--overwrite"):
        write(cache, make_manifest(), make_rows(make_manifest()))
    assert CacheReader.open(cache).verify() == []
    shutil.copytree(cache, aside)
    write(cache, make_manifest(seed=1), make_rows(make_manifest()), overwrite=True)
    assert os.listdir(cache.parent) == [cache.name]


def test_a_path_taken_during_the_build_is_not_replaced(tmp_path: Path) -> None:
    path, manifest = tmp_path / "a.zarr", make_manifest(rows=4)
    rows = make_rows(manifest)
    arrays = make_arrays(manifest)
    with CacheWriter.create(path, manifest, arrays, tasks=TASKS, overwrite=True) as writer:
        writer.write_chunk(0, rows)
        path.mkdir()
        with pytest.raises(CraftError, match="not a craft cache"):
            writer.finish()
    assert os.listdir(tmp_path) == ["a.zarr"]


def test_a_full_disk_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = tree(cache.parent)
    monkeypatch.setattr(zarr.Array, "__setitem__", full)
    with pytest.raises(CraftError, match="disk is full") as caught:
        write(cache, make_manifest(), make_rows(make_manifest()), overwrite=True)
    assert "the cache needs 1.2 kB in all; the disk at /" in caught.value.why
    assert tree(cache.parent) == before
