import json
from pathlib import Path

import numpy as np
import pytest
from made.manifests import make_manifest
from made.rows import write_rows

from craftcli.cache.dtypes import decode, encode
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.zarr_layout import required_arrays
from craftcli.cache.summary import CacheSummary, summarize

MANIFEST = make_manifest(
    complete=False,
    rows=5,
    rows_per_chunk=2,
    layers=(3,),
    dtype="bfloat16",
    seed=7,
    versions={"zarr": "3"},
)
MASK = np.array([[True, False], [True, True], [True, True], [False, True], [True, True]])
HIDDEN = encode(np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32), "bfloat16")


def build(path: Path, valid: list[bool]) -> CacheSummary:
    rows = {
        "hidden/vlm.3": HIDDEN,
        "hidden_mask": MASK,
        "inputs/state": np.zeros((5, 4), np.float32),
        "index/dataset_index": np.arange(5),
        "index/episode": np.array([0, 0, 3, 3, 9]),
        "index/frame": np.arange(5),
        "index/task": np.array([1, 1, 1, 0, 0]),
        "valid": np.array(valid),
    }
    arrays = required_arrays(MANIFEST) | {"inputs/state": ArraySpec(shape=(4,), dtype="float32")}
    write_rows(path, MANIFEST, arrays, rows, tasks=["push", "pull", "never"])
    return summarize(CacheReader.open(path))


def test_counts_cover_valid_rows(tmp_path: Path) -> None:
    summary = build(tmp_path / "a.zarr", [True, True, True, True, False])
    assert (summary.rows, summary.valid_rows, summary.chunks) == (5, 4, 3)
    assert summary.tasks == {"push": 1, "pull": 3, "never": 0}
    assert summary.episodes == 2
    assert summary.bytes_per_row == 2 * 3 * 2 + 2 + 16 + 4 * 8 + 1
    assert summary.size_bytes > 6 * summary.bytes_per_row
    assert summary.complete


def test_norms_cover_valid_vectors(tmp_path: Path) -> None:
    valid = [True, True, False, True, True]
    summary = build(tmp_path / "a.zarr", valid)
    (norms,) = summary.layer_norms
    kept = decode(HIDDEN, "bfloat16").astype(np.float64)
    targets = MASK & np.array(valid)[:, None]
    expected = np.linalg.norm(kept[targets], axis=1)
    assert (norms.layer, norms.count) == ("vlm.3", len(expected))
    assert norms.mean == pytest.approx(expected.mean())
    assert norms.std == pytest.approx(expected.std())
    assert (norms.min, norms.max) == pytest.approx((expected.min(), expected.max()))
    channel_means = [kept[targets[:, v], v].var(axis=0).mean() for v in range(2)]
    weighed = np.average(channel_means, weights=targets.sum(axis=0))
    assert norms.scalar_variance == pytest.approx(weighed)


def test_a_cache_without_valid_rows_can_be_summed_up(tmp_path: Path) -> None:
    summary = build(tmp_path / "a.zarr", [False] * 5)
    (norms,) = summary.layer_norms
    assert (norms.count, norms.mean, norms.std, norms.min, norms.max) == (0, 0, 0, 0, 0)
    assert (summary.valid_rows, summary.episodes) == (0, 0)


def test_it_is_plain_json(tmp_path: Path) -> None:
    summary = build(tmp_path / "a.zarr", [True] * 5)
    data = summary.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["teacher"]["source"] == "a/b"
    assert data["layer_norms"][0]["layer"] == "vlm.3"
