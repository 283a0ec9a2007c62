"""`craft cache import`, `merge` and `export` as commands: what they print, refuse and leave."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.writing.unfinished import Resumable
from craftcli.cache.writing.writer import CacheWriter

type Craft = Callable[..., Any]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A prototype's folder of five rows."""
    torch.manual_seed(0)
    folder = tmp_path / "old"
    folder.mkdir()
    metadata = {"num_anchors": 5, "layers_to_save": [-2, -1], "policy_pretrained_path": "pi/fast"}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    for number, rows in enumerate((3, 2)):
        content = {
            "pixel_values": torch.rand(rows, 3, 4, 4) * 2 - 1,
            "input_ids": torch.randint(0, 9, (rows, 6)),
            "attention_mask": torch.ones(rows, 6, dtype=torch.int64),
            "teacher_hidden": torch.randn(rows, 2, 2, 8),
            "meta": {},
        }
        torch.save(content, folder / f"shard_{number:04d}.pt")
    return folder


def succeeded(result: Any) -> Any:
    assert result.exit_code == 0, result.output
    return result


def refused(result: Any, exit_code: int = 1) -> str:
    assert result.exit_code == exit_code, result.output
    assert "Traceback" not in result.output
    assert "has no explanation" not in result.stderr
    return str(result.stderr)


def test_import_shows_what_it_found(craft: Craft, old: Path) -> None:
    result = succeeded(craft("cache", "import", "old"))
    assert result.stderr.splitlines()[-1] == "Next: craft cache inspect anchors.zarr"
    for text in ("5 in 2 shards", "num_anchors 5", "teacher_hidden", "16, 17 of 18", "pi/fast"):
        assert text in result.stdout
    assert "5 rows, 0 not valid" in result.stdout
    assert "will refuse this cache" in result.stderr
    assert CacheReader.open(Path("anchors.zarr")).verify() == []
    shown = succeeded(craft("cache", "inspect", "--verify"))
    assert "Verified" in shown.stdout


def test_import_as_json(craft: Craft, old: Path) -> None:
    result = succeeded(craft("cache", "import", old, "-o", "x.zarr", "--layer-count", 4, "--json"))
    document = json.loads(result.stdout)
    expected = {
        "rows": 5,
        "invalid_rows": 0,
        "shards": 2,
        "layers": [2, 3],
        "layers_known": True,
        "kind": "hidden",
        "dtype": "float32",
        "counted": {"num_anchors": 5},
        "output": "x.zarr",
    }
    assert {name: document[name] for name in expected} == expected


def test_import_replaces_only_when_asked(craft: Craft, old: Path) -> None:
    succeeded(craft("cache", "import", old))
    assert "--overwrite" in refused(craft("cache", "import", old))
    succeeded(craft("cache", "import", old, "--overwrite"))
    assert "not a craft cache" in refused(craft("cache", "import", old, "-o", old, "--overwrite"))


def test_import_takes_fewer_rows_than_counted_only_when_asked(craft: Craft, old: Path) -> None:
    (old / "shard_0001.pt").unlink()
    message = refused(craft("cache", "import", old))
    assert "num_anchors = 5" in message
    assert "hold 3 rows" in message
    assert not Path("anchors.zarr").exists()
    succeeded(craft("cache", "import", old, "--trust-rows"))


def test_two_shards_with_one_number_are_refused(craft: Craft, old: Path) -> None:
    shutil.copy(old / "shard_0000.pt", old / "shard_0.pt")
    message = refused(craft("cache", "import", "old", "-o", "one.zarr"))
    assert "shard_0.pt and shard_0000.pt are both number 0" in " ".join(message.split())
    assert not Path("one.zarr").exists()


def test_merge_then_export(craft: Craft, old: Path) -> None:
    for name in ("a.zarr", "b.zarr"):
        succeeded(craft("cache", "import", old, "-o", name))
    result = succeeded(craft("cache", "merge", "a.zarr", "b.zarr", "-o", "c.zarr"))
    assert "Writing 10 rows" in result.stdout
    assert "Joined 5 + 5 rows; left out 0 duplicates" in result.stdout
    result = succeeded(craft("cache", "export", "c.zarr", "--no-inputs"))
    plan, done = result.stdout.splitlines()
    assert "10 rows" in plan
    assert done.startswith("Wrote c.safetensors")
    tensors = load_file("c.safetensors")
    assert tensors["hidden/vlm.16"].shape == (10, 2, 8)
    assert not any(name.startswith("inputs/") for name in tensors)


def test_merge_and_export_as_json(craft: Craft, old: Path) -> None:
    for name in ("a.zarr", "b.zarr"):
        succeeded(craft("cache", "import", old, "-o", name))
    merged = succeeded(craft("cache", "merge", "a.zarr", "b.zarr", "-o", "c.zarr", "--json"))
    assert json.loads(merged.stdout)["source_rows"] == [5, 5]
    exported = succeeded(craft("cache", "export", "c.zarr", "-o", "out", "--json"))
    document = json.loads(exported.stdout)
    assert document["size_bytes"] == Path("out").stat().st_size
    assert "inputs/pixel_values" in document["tensors"]
    assert "--overwrite" in refused(craft("cache", "export", "c.zarr", "-o", "out"))
    succeeded(craft("cache", "export", "c.zarr", "-o", "out", "--overwrite"))


def test_refusals(craft: Craft, old: Path) -> None:
    succeeded(craft("cache", "import", old, "-o", "a.zarr"))
    succeeded(craft("cache", "import", old, "-o", "b.zarr", "--layer-count", 4))
    assert "two or more" in refused(craft("cache", "merge", "a.zarr", "-o", "c.zarr"))
    message = refused(craft("cache", "merge", "a.zarr", "b.zarr", "-o", "c.zarr"))
    assert "layer_count (18 and 4)" in message
    assert "No cache" in refused(craft("cache", "merge", "a.zarr", "none", "-o", "c.zarr"))
    assert "No cache" in refused(craft("cache", "export", "none"))
    assert "no such folder" in refused(craft("cache", "import", "none"))
    assert "--output" in refused(craft("cache", "merge", "a.zarr", "b.zarr"), exit_code=2)
    assert "--layer-count" in refused(
        craft("cache", "import", old, "--layer-count", 0), exit_code=2
    )
    assert not Path("c.zarr").exists()


@pytest.mark.parametrize("command", ["import", "merge", "export"])
def test_help_ends_with_examples(craft: Craft, command: str) -> None:
    text = succeeded(craft("cache", command, "--help")).stdout
    assert f"craft cache {command}" in text.partition("Examples:")[2]


def leave_half(path: Path, *, resumable: bool) -> Path:
    """What `kill -9` leaves of a command that wrote the first chunk of a cache to `path`."""
    source = CacheReader.open(Path("one.zarr"))
    manifest = replace(source.manifest, rows_per_chunk=2, complete=False)
    rows = {name: source.read(name, np.arange(2)) for name in source.array_names()}
    specs = {name: source.spec(name) for name in rows}
    kept = path.with_name("kept")
    with CacheWriter.create(
        path,
        manifest,
        specs,
        tasks=source.tasks,
        overwrite=False,
        resumable=Resumable(resume=False) if resumable else None,
    ) as writer:
        writer.write_chunk(0, rows)
        shutil.copytree(path.with_name(f"{path.name}.partial"), kept)
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    return kept.rename(partial)


def test_a_killed_import_or_merge_is_no_obstacle_to_the_next(craft: Craft, old: Path) -> None:
    succeeded(craft("cache", "import", "old", "-o", "one.zarr"))
    for command in (("import", "old"), ("merge", "one.zarr", "one.zarr")):
        partial = leave_half(Path("half.zarr"), resumable=False)
        message = refused(craft("cache", "inspect", "half.zarr"))
        assert "half-built" in message
        assert "start it again" in message
        assert "--resume" not in message
        succeeded(craft("cache", *command, "-o", "half.zarr"))
        assert CacheReader.open(Path("half.zarr")).verify() == []
        assert not partial.exists()
        shutil.rmtree("half.zarr")


def test_a_killed_build_in_the_way_of_a_merge_goes_only_when_asked(craft: Craft, old: Path) -> None:
    succeeded(craft("cache", "import", "old", "-o", "one.zarr"))
    partial = leave_half(Path("half.zarr"), resumable=True)
    merge = ("cache", "merge", "one.zarr", "one.zarr", "-o", "half.zarr")
    message = refused(craft(*merge))
    assert "is half-built" in message
    assert "--overwrite" in message
    assert partial.exists()
    succeeded(craft(*merge, "--overwrite"))
    assert not partial.exists()


def test_task_after_task_each_is_held_to_the_policy_that_had_just_learned_it(craft: Craft) -> None:
    few = ("--batch-size", "2", "--anchor-batch-size", "2", "--steps", "2")
    embed = ("--images", "embed", "--samples", "8")
    succeeded(craft("cache", "build", *embed, "-o", "first.zarr"))
    succeeded(craft("train", *few, "--cache", "first.zarr", "-o", "run"))
    built = ("cache", "build", "--policy", "run", "--dataset", "demo", "--exclude", "first.zarr")
    succeeded(craft(*built, *embed, "-o", "second.zarr"))
    merge = ("cache", "merge", "first.zarr", "second.zarr", "-o", "both.zarr")
    assert "--several-teachers" in refused(craft(*merge))
    succeeded(craft(*merge, "--several-teachers"))
    train = ("train", "--policy", "run", "--dataset", "demo", *few, "--cache", "both.zarr")
    assert "--other-student" in refused(craft(*train, "-o", "next"))
    trained = succeeded(craft(*train, "-o", "next", "--other-student"))
    start = re.search(r"L_ret of the other student at the start: (\S+)", trained.output)
    assert start
    assert float(start[1]) > 0
