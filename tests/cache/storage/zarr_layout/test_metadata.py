"""What a file says of itself is checked when it is opened."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zarr
from made.manifests import make_manifest
from made.small_cache import TASKS, make_arrays, make_rows, write

from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.writing.writer import CacheWriter
from craftcli.errors import CraftError


def edit_attributes(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = path / "zarr.json"
    metadata = json.loads(file.read_text("utf-8"))
    change(metadata["attributes"])
    file.write_text(json.dumps(metadata), "utf-8")


def set_manifest(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda attributes: attributes["craft"].update(changes)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda attributes: attributes["craft"].pop("dim"), "field dim is missing"),
        (set_manifest(dimm=3), "field dimm is unknown"),
        (set_manifest(dim="3"), "field dim is '3', not an integer"),
        (set_manifest(format_version="3.0"), "newer craft"),
        (set_manifest(complete=False), "is incomplete"),
        (set_manifest(rows=11), "has the shape"),
        (set_manifest(rows_per_chunk=5), "has chunks of"),
        (set_manifest(layers=[1, 2]), "array hidden/vlm.1 is missing"),
        (set_manifest(dim=4), "does not match the manifest"),
        (set_manifest(dtype="bfloat16"), "does not match the manifest"),
        (lambda attributes: attributes.pop("craft"), 'without the attribute "craft"'),
        (lambda attributes: attributes.update(craft=3), "not an object"),
        (lambda attributes: attributes.pop("arrays"), '"arrays" is malformed'),
        (lambda attributes: attributes.pop("tasks"), '"tasks" is not a list'),
    ],
)
def test_an_edited_manifest_is_refused(
    cache: Path, change: Callable[[dict[str, Any]], Any], problem: str
) -> None:
    edit_attributes(cache, change)
    with pytest.raises(CraftError, match=problem):
        CacheReader.open(cache)


@pytest.mark.parametrize(
    "change",
    [
        lambda attributes: attributes["tasks"].__setitem__(0, "open the doof"),
        lambda attributes: attributes["craft"].__setitem__("pooling", "last_tokem"),
        lambda attributes: attributes["craft"]["teacher"].__setitem__("source", "someone/else"),
        lambda attributes: attributes.pop("digest"),
    ],
)
def test_a_changed_word_of_the_metadata_is_noticed(
    cache: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    edit_attributes(cache, change)
    with pytest.raises(CraftError, match="were changed after the build"):
        CacheReader.open(cache)


@pytest.mark.parametrize("name", ["hidden/vlm.2", "inputs/with", "commit", "stats/vlm.3/count"])
def test_a_missing_array_is_refused(cache: Path, name: str) -> None:
    shutil.rmtree(cache / name)
    with pytest.raises(CraftError, match=f"array {name}.* is missing"):
        CacheReader.open(cache)


def edit_array(cache: Path, **changes: Any) -> None:
    file = cache / "inputs/action.tokens/zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"shape": [10, 6]}, "has the shape"),
        ({"data_type": "uint32"}, "is uint32"),
        ({"codecs": "none"}, "cannot be read"),
    ],
)
def test_an_array_with_other_metadata_is_refused(
    cache: Path, changes: dict[str, Any], problem: str
) -> None:
    edit_array(cache, **changes)
    with pytest.raises(CraftError, match=problem):
        CacheReader.open(cache)


def test_a_missing_path_is_told_from_a_half_built_one(tmp_path: Path) -> None:
    path = tmp_path / "anchors.zarr"
    with pytest.raises(CraftError, match="nothing is there"):
        CacheReader.open(path)
    manifest = make_manifest()
    arrays = make_arrays(manifest)
    with CacheWriter.create(path, manifest, arrays, tasks=TASKS, overwrite=False):
        with pytest.raises(CraftError, match="half-built"):
            CacheReader.open(path)
        with pytest.raises(CraftError, match="incomplete"):
            CacheReader.open(tmp_path / "anchors.zarr.partial")
    write(path, manifest, make_rows(manifest))
    assert CacheReader.open(path).verify() == []


def test_what_is_no_cache_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    zarr.create_array(tmp_path / "array.zarr", shape=(1,), dtype="int8")
    zarr.create_group(tmp_path / "group.zarr")
    zarr.create_group(tmp_path / "old.zarr", zarr_format=2)
    for name, why in [
        ("file", "not a folder"),
        ("folder", "not a Zarr v3 group"),
        ("link", "a link to nothing"),
        ("array.zarr", "not a Zarr v3 group"),
        ("old.zarr", "not a Zarr v3 group"),
        ("group.zarr", 'without the attribute "craft"'),
    ]:
        with pytest.raises(CraftError, match=why):
            CacheReader.open(tmp_path / name)


def test_garbled_group_metadata_is_refused(cache: Path) -> None:
    (cache / "zarr.json").write_text("{")
    with pytest.raises(CraftError, match="not a Zarr v3 group"):
        CacheReader.open(cache)
