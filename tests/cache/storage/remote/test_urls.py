"""URLs as places of caches: which ones there are, and every command with them."""

import json
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest
from made.remote_cache import StoppedError, build, raw, stop_before, tree

from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.remote_folder import RemoteFolder
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE, CraftError
from craftcli.locations import RemotePath, locate


@pytest.mark.parametrize("url", ["s3://bucket", "s3://", "ftp://host/a.zarr"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(CraftError, match="cannot be the location of a cache") as refused:
        locate(url)
    assert refused.value.exit_code == EXIT_USAGE


def test_a_url_is_known_also_as_a_path() -> None:
    assert locate("s3://bucket/a/") == RemotePath("s3://bucket/a")
    assert locate(Path("s3://bucket/a")) == RemotePath("s3://bucket/a")
    assert locate("a/b.zarr") == Path("a/b.zarr")
    assert RemotePath("gs://bucket/a.zarr").name == "a.zarr"


def test_the_extra_is_named_when_it_is_missing(
    path: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(CraftError, match="not installed") as refused:
        CacheReader.open(path)
    assert "craftcli[remote]" in refused.value.fix
    assert refused.value.exit_code == EXIT_USAGE


def test_the_hub_is_reached_through_fsspec(monkeypatch: pytest.MonkeyPatch, local: Path) -> None:
    """Nothing here may reach the Hub: fsspec's own memory stands for it, behind the same store."""
    from zarr.storage import FsspecStore

    name, open_url = uuid.uuid4().hex, FsspecStore.from_url
    monkeypatch.setattr(FsspecStore, "from_url", lambda _: open_url(f"memory://{name}/a.zarr"))
    path = RemotePath(f"hf://datasets/me/{name}/a.zarr")
    with pytest.raises(StoppedError):
        build(path, before_chunk=stop_before(2))
    assert build(path, resume=True) == {0, 1}
    folder = RemoteFolder(path)
    assert {file: folder.read(file) for file in folder.names()} == tree(local)
    reader = CacheReader.open(path)
    assert reader.verify() == []
    assert reader.modified().tzinfo is not None
    build(path, overwrite=True)


def test_the_commands_take_urls(
    craft: Callable[..., Any], cache: Path, path: RemotePath, tmp_path: Path
) -> None:
    small = ("--samples", "32", "--images", "embed", "--device", "cpu")
    built = craft("cache", "build", "-o", path, *small, "--json")
    assert built.exit_code == 0, built.output
    assert json.loads(built.stdout)["path"] == str(path)
    assert tree(path) == tree(cache)
    shown = craft("cache", "inspect", path, "--verify", "--verify-rows", "2", "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["verified"]
    exported = craft("cache", "export", path)
    assert exported.exit_code == 0, exported.output
    assert (tmp_path / "a.safetensors").exists()
    again = craft("cache", "build", "-o", path, *small)
    assert again.exit_code == 1
    assert "--overwrite" in again.stderr
    name = "inputs/observation.state/c/0/0"
    name = name if name in tree(path) else "valid/c/0"
    data = bytearray(tree(path)[name])
    data[0] ^= 1
    obstore.put(raw(path), name, bytes(data))
    spoiled = craft("cache", "inspect", path, "--verify")
    assert spoiled.exit_code == EXIT_CHECK_FAILED
    assert "the checksum does not match" in spoiled.stderr
    wrong = craft("cache", "inspect", "ftp://host/a.zarr")
    assert wrong.exit_code == EXIT_USAGE


def test_training_reads_from_a_url(
    craft: Callable[..., Any], build: Callable[..., Any], path: RemotePath, cache: Path
) -> None:
    build(path)
    short = ("--steps", "3", "--log-every", "1", "--device", "cpu", "--json")
    for name, at in (("a", path), ("b", cache)):
        run = craft("train", "--cache", at, "-o", name, *short)
        assert run.exit_code == 0, run.output
    metrics = [Path(name, "metrics.jsonl").read_text().splitlines() for name in ("a", "b")]
    losses = [[json.loads(line)["loss"] for line in lines] for lines in metrics]
    assert losses[0] == losses[1]
