"""Joining and exporting caches with made rows: no variation is taken for its frame."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import made.manifests
import numpy as np
import pytest
from made.rows import random_rows, write_rows
from safetensors import safe_open

from craftcli.cache.format import UNPACKED_VERSION, MadeRows
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.zarr_layout import required_arrays
from craftcli.cache.transfer.export import export_cache, plan_export
from craftcli.cache.transfer.join import JoinPlan, join_caches, plan_join
from craftcli.cache.variations import PARTNERS, SEEDS, WEIGHTS

MANIFEST = made.manifests.make_manifest(
    teacher=replace(made.manifests.TEACHER, weights_digest="w" * 64),
)
VARIATIONS = {
    PARTNERS: ArraySpec(shape=(), dtype="int64"),
    WEIGHTS: ArraySpec(shape=(), dtype="float32"),
    SEEDS: ArraySpec(shape=(), dtype="int64"),
}


def make(
    path: Path,
    index: list[int],
    seeds: list[int] | None = None,
    *,
    source: str = "augment",
    partner: int = 3,
    weight: float = 0.75,
    noise: str = "0.3",
    **changes: Any,
) -> Path:
    """A cache whose rows have these frames; those with a seed of 0 or more are made."""
    manifest = replace(MANIFEST, rows=len(index), **changes)
    arrays = required_arrays(manifest)
    if seeds is not None:
        count = sum(seed >= 0 for seed in seeds)
        ways = MadeRows(source=source, rows=count, settings={"noise": noise})
        manifest = replace(manifest, made=ways)
        arrays |= VARIATIONS
    rows = random_rows(manifest, arrays, seed=0)
    rows["valid"][:] = True
    rows["index/task"][:] = 0
    rows["index/dataset_index"] = np.array(index, np.int64)
    if seeds is not None:
        is_made = np.array(seeds) >= 0
        rows[SEEDS] = np.array(seeds, np.int64)
        rows[PARTNERS] = np.where(is_made, partner, index).astype(np.int64)
        rows[WEIGHTS] = np.where(is_made, weight, 1).astype(np.float32)
    write_rows(path, manifest, arrays, rows, tasks=("push",))
    return path


def join(*paths: Path) -> tuple[JoinPlan, CacheReader]:
    plan = plan_join(paths)
    output = paths[0].parent / "joined.zarr"
    join_caches(plan, output, overwrite=True, on_rows=lambda _: None)
    return plan, CacheReader.open(output)


def test_variations_of_a_frame_are_all_kept(tmp_path: Path) -> None:
    one = make(tmp_path / "a", [1, 2, 1, 1], [-1, -1, 7, 8])
    two = make(tmp_path / "b", [1, 4, 1, 1], [-1, -1, 7, 9])
    plan, joined = join(one, two)
    # Frame 1 and its variation with seed 7 are in both.
    assert plan.duplicates == 2
    assert joined.read_all("index/dataset_index").tolist() == [1, 2, 1, 1, 4, 1]
    assert joined.read_all(SEEDS).tolist() == [-1, -1, 7, 8, -1, 9]
    assert joined.manifest.made == MadeRows(source="augment", rows=3, settings={"noise": "0.3"})


@pytest.mark.parametrize(
    "other", [{"noise": "0.1"}, {"partner": 5}, {"weight": 0.5}, {"source": "draws"}]
)
def test_variations_made_in_another_way_are_others(tmp_path: Path, other: Any) -> None:
    one = make(tmp_path / "a", [1, 1], [-1, 7])
    plan, joined = join(one, make(tmp_path / "b", [1, 1], [-1, 7], **other))
    assert plan.duplicates == 1
    assert joined.read_all(SEEDS).tolist() == [-1, 7, 7]


def test_frames_and_variations_are_joined(tmp_path: Path) -> None:
    frames = make(tmp_path / "a", [1, 2, 5])
    varied = make(tmp_path / "b", [1, 1, 2], [-1, 7, 8])
    for paths, rows in (
        ((frames, varied), [(1, -1), (2, -1), (5, -1), (1, 7), (2, 8)]),
        ((varied, frames), [(1, -1), (1, 7), (2, 8), (2, -1), (5, -1)]),
    ):
        _, joined = join(*paths)
        index, seeds, partners = (
            joined.read_all(name).tolist() for name in ("index/dataset_index", SEEDS, PARTNERS)
        )
        assert list(zip(index, seeds, strict=True)) == rows
        assert [p for p, s in zip(partners, seeds, strict=True) if s < 0] == [
            i for i, s in zip(index, seeds, strict=True) if s < 0
        ]
        assert joined.manifest.format_version == UNPACKED_VERSION
        assert joined.manifest.made is not None
        assert joined.manifest.made.rows == 2
        assert joined.verify() == []


def test_several_ways_are_all_named(tmp_path: Path) -> None:
    one = make(tmp_path / "a", [1, 1], [-1, 7])
    two = make(tmp_path / "b", [0, 1], [3, 4], source="statistics", noise="0.1")
    _, joined = join(one, two)
    assert joined.manifest.made == MadeRows(
        source="augment+statistics", rows=3, settings={"noise": "0.3, 0.1"}
    )


def test_caches_of_frames_alone_stay_in_the_old_format(tmp_path: Path) -> None:
    _, joined = join(make(tmp_path / "a", [1, 2]), make(tmp_path / "b", [3, 2]))
    assert joined.manifest.format_version == UNPACKED_VERSION
    assert "made" not in joined.manifest.to_json()
    assert not set(VARIATIONS) & set(joined.array_names())


def test_an_export_holds_the_recipes(tmp_path: Path) -> None:
    path = make(tmp_path / "a", [1, 2, 1], [-1, -1, 7])
    file = tmp_path / "a.safetensors"
    export_cache(plan_export(path), file, overwrite=False, on_rows=lambda _: None)
    with safe_open(file, framework="np") as opened:
        assert opened.get_tensor(SEEDS).tolist() == [-1, -1, 7]
        assert '"augment"' in opened.metadata()["craft"]
