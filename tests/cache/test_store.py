import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from made.manifests import make_manifest
from made.rows import Rows, random_rows, write_rows

from craftcli.cache.chunks import ArraySpec
from craftcli.cache.dtypes import decode
from craftcli.cache.format import Manifest
from craftcli.cache.reader import CacheReader
from craftcli.cache.store import required_arrays
from craftcli.cache.writer import CacheWriter
from craftcli.errors import CraftError

TASKS = ["push the cube", "öffne die Tür"]
INPUTS = {
    "inputs/observation.images.top": ArraySpec(shape=(3, 2, 2), dtype="uint8"),
    "inputs/action.tokens": ArraySpec(shape=(5,), dtype="int32"),
    "inputs/with/slash": ArraySpec(shape=(), dtype="float64"),
}


def make_arrays(manifest: Manifest) -> dict[str, ArraySpec]:
    return required_arrays(manifest) | INPUTS


def make_rows(manifest: Manifest, seed: int = 0) -> Rows:
    rows = random_rows(manifest, make_arrays(manifest), seed)
    rows["index/dataset_index"] = np.arange(manifest.rows) * 7
    return rows


def write(path: Path, manifest: Manifest, rows: Rows, *, overwrite: bool = False) -> None:
    write_rows(path, manifest, make_arrays(manifest), rows, tasks=TASKS, overwrite=overwrite)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "anchors.zarr"
    write(path, make_manifest(), make_rows(make_manifest()))
    return path


def edit_attributes(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = path / "zarr.json"
    metadata = json.loads(file.read_text("utf-8"))
    change(metadata["attributes"])
    file.write_text(json.dumps(metadata), "utf-8")


@settings(deadline=None, derandomize=True, max_examples=15)
@given(
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    rows=st.integers(1, 13),
    chunk=st.integers(1, 14),
    vectors=st.integers(1, 3),
    dim=st.integers(1, 5),
    data=st.data(),
)
def test_what_is_written_is_read(
    dtype: str, rows: int, chunk: int, vectors: int, dim: int, data: st.DataObject
) -> None:
    manifest = make_manifest(
        rows=rows, rows_per_chunk=min(rows, chunk), vectors=vectors, dim=dim, dtype=dtype
    )
    order = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=20)), np.int64)
    written = make_rows(manifest)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "anchors.zarr"
        write(path, manifest, written)
        assert os.listdir(folder) == ["anchors.zarr"]
        reader = CacheReader.open(path)
        assert reader.manifest == replace(manifest, complete=True)
        assert reader.array_names() == sorted(written)
        for name, values in written.items():
            assert reader.spec(name) == make_arrays(manifest)[name]
            for got, expected in [
                (reader.read(name, order), values[order]),
                (reader.read_all(name), values),
            ]:
                assert got.dtype == expected.dtype
                np.testing.assert_array_equal(got, expected)
        assert reader.verify() == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stock_zarr_reads_the_documented_names(tmp_path: Path, dtype: str) -> None:
    manifest = make_manifest(dtype=dtype)
    rows = make_rows(manifest)
    write(tmp_path / "a.zarr", manifest, rows)
    group = zarr.open_group(tmp_path / "a.zarr", mode="r")
    assert Manifest.from_json(group.attrs["craft"]) == manifest
    assert group.attrs["tasks"] == TASKS
    found = {name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    statistics = {
        f"stats/vlm.{layer}/{name}" for layer in (2, 3) for name in ("mean", "variance", "count")
    }
    assert found == set(rows) | statistics | {"commit"}
    for name, values in rows.items():
        array = group[name]
        assert isinstance(array, zarr.Array)
        np.testing.assert_array_equal(array[:], values)
        assert array.chunks == (4, *values.shape[1:])
        bfloat16 = dtype == "bfloat16" and name.startswith("hidden/")
        assert array.attrs.asdict() == ({"craft_dtype": "bfloat16"} if bfloat16 else {})


def test_statistics_cover_the_targets_of_valid_rows(tmp_path: Path) -> None:
    manifest = make_manifest(dtype="float16")
    rows = make_rows(manifest)
    rows["hidden/vlm.3"][~rows["valid"]] = np.nan
    write(tmp_path / "a.zarr", manifest, rows)
    stats = CacheReader.open(tmp_path / "a.zarr").stats("vlm.3")
    hidden = decode(rows["hidden/vlm.3"], "float16").astype(np.float64)
    for position in range(2):
        kept = hidden[rows["valid"] & rows["hidden_mask"][:, position], position]
        assert stats.count[position] == len(kept)
        np.testing.assert_allclose(stats.mean[position], kept.mean(axis=0))
        np.testing.assert_allclose(stats.variance[position], kept.var(axis=0))


def test_all_zero_chunks_have_files(tmp_path: Path) -> None:
    manifest = make_manifest()
    rows = {name: np.zeros_like(values) for name, values in make_rows(manifest).items()}
    write(tmp_path / "a.zarr", manifest, rows)
    assert CacheReader.open(tmp_path / "a.zarr").verify() == []


def test_a_cache_without_hidden_states_has_no_statistics(tmp_path: Path) -> None:
    manifest = make_manifest(kinds=("token_ce",), layers=())
    write(tmp_path / "a.zarr", manifest, make_rows(manifest))
    reader = CacheReader.open(tmp_path / "a.zarr")
    assert "hidden_mask" not in reader.array_names()
    assert reader.verify() == []


def test_the_size_is_that_of_the_files(cache: Path) -> None:
    size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    assert CacheReader.open(cache).size_on_disk() == size


@pytest.mark.parametrize("rows", [[-1], [10], [0, 99]])
def test_rows_outside_are_refused(cache: Path, rows: list[int]) -> None:
    with pytest.raises(IndexError):
        CacheReader.open(cache).read("valid", np.array(rows))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint64"])
@pytest.mark.parametrize("rows", [[6, 4, 6], [9, 0, 9]])
def test_rows_may_have_any_integer_dtype(cache: Path, rows: list[int], dtype: str) -> None:
    got = CacheReader.open(cache).read("hidden/vlm.3", np.array(rows, dtype))
    np.testing.assert_array_equal(got, make_rows(make_manifest())["hidden/vlm.3"][rows])
    # What was read is a copy: neither the file nor another batch can change with it.
    got[:] = 0


@pytest.mark.parametrize("rows", [np.array([True, False]), np.array([0.0]), np.array([[0]])])
def test_rows_must_be_integers(cache: Path, rows: npt.NDArray[Any]) -> None:
    with pytest.raises(TypeError):
        CacheReader.open(cache).read("valid", rows)


def test_an_unknown_array_is_answered_with_the_closest(cache: Path) -> None:
    with pytest.raises(CraftError, match=r"ask for inputs/action\.tokens"):
        CacheReader.open(cache).read_all("inputs/action.token")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5] ^= 16
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip, "the checksum does not match"),
        (truncate, "bytes instead of"),
        (empty, "has 0 bytes"),
        (Path.unlink, "the file is missing"),
    ],
)
@pytest.mark.parametrize("name", ["hidden/vlm.3", "inputs/observation.images.top"])
def test_a_damaged_chunk_is_found(
    cache: Path, name: str, damage: Callable[[Path], None], problem: str
) -> None:
    damage(next(file for file in (cache / name / "c/2").rglob("*") if file.is_file()))
    reader = CacheReader.open(cache)
    (found,) = reader.verify()
    assert found.startswith(f"{name} chunk 2 (rows 8 to 9): ")
    assert problem in found
    reader.read(name, np.arange(8))
    with pytest.raises(CraftError, match=r"chunk 2 \(rows 8 to 9\)") as caught:
        reader.read(name, np.array([0, 9]))
    assert name in caught.value.why
    assert "craft cache inspect" in caught.value.fix
    with pytest.raises(CraftError, match="is damaged"):
        reader.read_all(name)


def test_swapped_chunks_are_found_by_the_commit_records(cache: Path) -> None:
    shutil.copy(cache / "hidden/vlm.3/c/0/0/0", cache / "hidden/vlm.3/c/1/0/0")
    (found,) = CacheReader.open(cache).verify()
    assert found.startswith("commit chunk 1 (rows 4 to 7): ")


@pytest.mark.parametrize("name", ["commit/c/1", "stats/vlm.2/variance/c/0/0"])
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_damage_beside_the_rows_is_found(
    cache: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(cache / name)
    (found,) = CacheReader.open(cache).verify()
    assert found.startswith(name.split("/c/")[0])


def test_damaged_statistics_are_not_returned(cache: Path) -> None:
    flip(cache / "stats/vlm.2/mean/c/0/0")
    with pytest.raises(CraftError, match=r"stats/vlm\.2/mean"):
        CacheReader.open(cache).stats("vlm.2")


def set_manifest(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda attributes: attributes["craft"].update(changes)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda attributes: attributes["craft"].pop("dim"), "field dim is missing"),
        (set_manifest(dimm=3), "field dimm is unknown"),
        (set_manifest(dim="3"), "field dim is '3', not an integer"),
        (set_manifest(format_version="2.0"), "newer craft"),
        (set_manifest(complete=False), "is incomplete"),
        (set_manifest(rows=11), "has the shape"),
        (set_manifest(rows_per_chunk=5), "has chunks of"),
        (set_manifest(layers=[1, 2]), "array hidden/vlm.1 is missing"),
        (set_manifest(dim=4), "not what the manifest says"),
        (set_manifest(dtype="bfloat16"), "not what the manifest says"),
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
    aside = cache.with_name(cache.name + ".replaced")
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
    with pytest.raises(CraftError, match="not those that were written"):
        CacheReader.open(cache)
