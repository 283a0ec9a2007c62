"""The statistics of a cache are covered by digests in its manifest."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made.manifests import make_manifest
from made.rows import random_rows, write_rows
from typer.testing import CliRunner

from craftcli.cache.format import Manifest
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.zarr_layout import required_arrays
from craftcli.cache.transfer.join import join_caches, plan_join
from craftcli.cli.app import app
from craftcli.errors import CraftError

FIXTURE = Path(__file__).parents[1] / "fixtures/all_kinds.zarr"


def write(path: Path, manifest: Manifest, seed: int = 0) -> Path:
    arrays = required_arrays(manifest)
    write_rows(path, manifest, arrays, random_rows(manifest, arrays, seed), tasks=["a", "b"])
    return path


def swap_layers(cache: Path) -> None:
    one, two = cache / "stats/vlm.2/mean", cache / "stats/vlm.3/mean"
    one.rename(cache / "aside")
    two.rename(one)
    (cache / "aside").rename(two)


def swap_moments(cache: Path) -> None:
    for name in ("mean", "variance"):
        shutil.copytree(cache / f"stats/vlm.2/{name}", cache / f"stats/{name}")
    for name, other in (("mean", "variance"), ("variance", "mean")):
        shutil.rmtree(cache / f"stats/vlm.2/{name}")
        (cache / f"stats/{other}").rename(cache / f"stats/vlm.2/{name}")


@pytest.mark.parametrize("swap", [swap_layers, swap_moments])
def test_swapped_statistics_are_found(tmp_path: Path, swap: Callable[[Path], Any]) -> None:
    path = write(tmp_path / "a.zarr", make_manifest())
    assert CacheReader.open(path).verify() == []
    assert CacheReader.open(path).stats_sealed
    swap(path)
    reader = CacheReader.open(path)
    assert any("stats/vlm.2: the statistics are not those" in text for text in reader.verify())
    with pytest.raises(CraftError, match=r"stats/vlm\.2"):
        reader.stats("vlm.2")
    result = CliRunner().invoke(app, ["cache", "inspect", str(path), "--verify"])
    assert result.exit_code == 3
    assert "stats/vlm.2" in result.stderr


def test_joined_caches_are_sealed_anew(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, make_manifest(), seed) for seed, name in enumerate("ab")]
    join_caches(
        plan_join(paths, keep_duplicates=True),
        tmp_path / "c",
        overwrite=False,
        on_rows=lambda _: None,
    )
    joined = CacheReader.open(tmp_path / "c")
    assert joined.stats_sealed
    assert joined.verify() == []
    assert joined.manifest.stats_digests != CacheReader.open(paths[0]).manifest.stats_digests


def test_a_cache_without_hidden_states_has_nothing_to_seal(tmp_path: Path) -> None:
    manifest = make_manifest(kinds=("action",), layers=(), vectors=1, dim=1)
    reader = CacheReader.open(write(tmp_path / "a.zarr", manifest))
    assert (reader.stats_sealed, reader.manifest.stats_digests) == (None, None)


def test_inspect_says_what_is_sealed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", make_manifest())
    shown = CliRunner().invoke(app, ["cache", "inspect", str(path)]).stdout
    assert "statistics; not frames: a craft that wrote no digests" in " ".join(shown.split())
    shown = CliRunner().invoke(app, ["cache", "inspect", str(FIXTURE)]).stdout
    assert "not statistics and frames: a craft that" in " ".join(shown.split())
