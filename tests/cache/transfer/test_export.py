"""Exporting to safetensors: every value, read back by the library itself; whole or not at all."""

import json
import os
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made.manifests import make_manifest
from made.rows import random_rows, write_rows
from safetensors import safe_open
from safetensors.numpy import load_file

from craftcli.cache.format import Manifest
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.zarr_layout import required_arrays
from craftcli.cache.transfer.export import ExportReport, export_cache, plan_export
from craftcli.errors import CraftError

IMAGE = "inputs/observation.images.top"
INPUTS = {
    IMAGE: ArraySpec(shape=(3, 2, 2), dtype="uint8", attributes={"craft_scale": "1/255"}),
    "inputs/state": ArraySpec(shape=(), dtype="float64"),
    "inputs/tokens": ArraySpec(shape=(5,), dtype="int32"),
    "inputs/small": ArraySpec(shape=(3,), dtype="int8"),
}
TASKS = ("push", "öffne die Tür")


def make(path: Path, dtype: str = "float32", rows: int = 7, image: Any = (3, 2, 2)) -> Path:
    manifest = make_manifest(rows=rows, rows_per_chunk=3, pooling="vision_text", dtype=dtype)
    arrays = required_arrays(manifest) | INPUTS
    arrays[IMAGE] = ArraySpec(shape=image, dtype="uint8", attributes=INPUTS[IMAGE].attributes)
    write_rows(path, manifest, arrays, random_rows(manifest, arrays), tasks=TASKS)
    return path


def export(path: Path, output: Path, *, overwrite: bool = False, **options: Any) -> ExportReport:
    plan = plan_export(path, **options)
    return export_cache(plan, output, overwrite=overwrite, on_rows=lambda _: None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_array_is_read_back_by_safetensors(tmp_path: Path, dtype: str) -> None:
    reader = CacheReader.open(make(tmp_path / "a.zarr", dtype))
    report = export(tmp_path / "a.zarr", tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == report.tensors == reader.array_names()
        for name in reader.array_names():
            got, expected = file.get_tensor(name), reader.read_all(name)
            assert tuple(got.shape) == expected.shape
            assert str(got.dtype) == f"torch.{reader.spec(name).craft_dtype}"
            assert got.contiguous().view(torch.uint8).numpy().tobytes() == expected.tobytes()
        assert str(file.get_tensor("hidden/vlm.2").dtype) == f"torch.{dtype}"
    assert report.size_bytes == (tmp_path / "a.safetensors").stat().st_size


def test_the_manifest_travels_along(tmp_path: Path) -> None:
    reader = CacheReader.open(make(tmp_path / "a.zarr"))
    export(tmp_path / "a.zarr", tmp_path / "out")
    with safe_open(tmp_path / "out", framework="np") as file:
        metadata = file.metadata()
    assert Manifest.from_json(json.loads(metadata["craft"])) == reader.manifest
    assert tuple(json.loads(metadata["tasks"])) == TASKS
    assert json.loads(metadata["arrays"])[IMAGE]["attributes"] == {"craft_scale": "1/255"}


def test_inputs_can_stay_out(tmp_path: Path) -> None:
    make(tmp_path / "a.zarr")
    plan = plan_export(tmp_path / "a.zarr", inputs=False)
    report = export(tmp_path / "a.zarr", tmp_path / "out", inputs=False)
    tensors = load_file(tmp_path / "out")
    assert sorted(tensors) == report.tensors
    assert not any(name.startswith("inputs/") for name in tensors)
    assert {"hidden/vlm.2", "hidden_mask", "index/episode", "valid"} < tensors.keys()
    assert plan.payload_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_tensors_begin_at_a_multiple_of_their_width(tmp_path: Path) -> None:
    export(make(tmp_path / "a.zarr"), tmp_path / "out")
    content = (tmp_path / "out").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    for name, entry in header.items():
        if name != "__metadata__":
            width = int("".join(c for c in entry["dtype"] if c.isdigit()) or 8) // 8
            assert entry["data_offsets"][0] % width == 0, name


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    make(tmp_path / "a.zarr")
    output = tmp_path / "out"
    output.write_text("precious")
    with pytest.raises(CraftError, match="--overwrite"):
        export(tmp_path / "a.zarr", output)
    assert output.read_text() == "precious"
    with pytest.raises(CraftError, match="not an export of craft's"):
        export(tmp_path / "a.zarr", output, overwrite=True)
    assert output.read_text() == "precious"
    output.unlink()
    for overwrite in (False, True):
        export(tmp_path / "a.zarr", output, overwrite=overwrite)
        assert "valid" in load_file(output)
    with pytest.raises(CraftError, match="is a folder"):
        export(tmp_path / "a.zarr", tmp_path / "a.zarr", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["a.zarr", "out"]


def test_nothing_is_written_into_a_cache(tmp_path: Path) -> None:
    cache = make(tmp_path / "a.zarr")
    before = (cache / "zarr.json").read_bytes()
    for name, overwrite in (("zarr.json", True), ("valid/c/0", True), ("new", False)):
        with pytest.raises(CraftError, match=r"not an export|inside the cache"):
            export(cache, cache / name, overwrite=overwrite)
    assert (cache / "zarr.json").read_bytes() == before
    assert not (cache / "new").exists()


def test_a_file_that_is_not_a_plain_one_is_not_replaced(tmp_path: Path) -> None:
    make(tmp_path / "a.zarr")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CraftError, match="not an export of craft's"):
        export(tmp_path / "a.zarr", tmp_path / "pipe", overwrite=True)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_what_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    make(tmp_path / "a.zarr")
    (tmp_path / ".out.0123456789abcdef.partial").write_bytes(bytes(1000))
    (tmp_path / ".other.0123456789abcdef.partial").write_bytes(b"of another file")
    export(tmp_path / "a.zarr", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == [".other.0123456789abcdef.partial", "a.zarr", "out"]


def test_a_link_still_points_to_the_file(tmp_path: Path) -> None:
    make(tmp_path / "a.zarr")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk/out")
    export(tmp_path / "a.zarr", tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert "valid" in load_file(tmp_path / "disk/out")


def damage(cache: Path) -> None:
    file = cache / "hidden/vlm.3/c/2/0/0"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_damaged_cache_leaves_nothing_and_replaces_nothing(
    tmp_path: Path, overwrite: bool
) -> None:
    make(tmp_path / "a.zarr")
    damage(tmp_path / "a.zarr")
    if overwrite:
        (tmp_path / "out").write_text("")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CraftError, match=r"hidden/vlm\.3"):
        export(tmp_path / "a.zarr", tmp_path / "out", overwrite=overwrite)
    assert sorted(os.listdir(tmp_path)) == before
    assert not overwrite or (tmp_path / "out").read_text() == ""


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    plan = plan_export(make(tmp_path / "a.zarr"))
    with pytest.raises(CraftError, match="disk is full"):
        export_cache(plan, tmp_path / "out", overwrite=False, on_rows=no_space)
    assert os.listdir(tmp_path) == ["a.zarr"]


def no_space(_rows: int) -> None:
    raise OSError(28, "No space left on device")


def test_the_folder_of_the_file_is_made(tmp_path: Path) -> None:
    make(tmp_path / "a.zarr")
    output = tmp_path / "new/deeper/out"
    export(tmp_path / "a.zarr", output)
    assert "valid" in load_file(output)
    # As any other file that a program writes, not private like a temporary one.
    assert stat.S_IMODE(output.stat().st_mode) == 0o666 & ~umask()


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    make(tmp_path / "a.zarr")
    (tmp_path / "taken").write_text("")
    with pytest.raises(CraftError, match="Cannot write"):
        export(tmp_path / "a.zarr", tmp_path / "taken/out")


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_memory_is_bounded_by_chunks(tmp_path: Path) -> None:
    wide = (3, 128, 128)
    plan = plan_export(make(tmp_path / "a.zarr", rows=40, image=wide))
    tracemalloc.start()
    export_cache(plan, tmp_path / "out", overwrite=False, on_rows=lambda _: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * np.prod(wide) / 4
