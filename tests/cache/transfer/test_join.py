"""Merging caches: rows in order, tasks united, each frame once, and nothing that does not fit."""

import hashlib
import os
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import made.manifests
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made.rows import Rows, random_rows, write_rows
from safetensors import safe_open

from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.zarr_layout import required_arrays
from craftcli.cache.transfer.export import export_cache, plan_export
from craftcli.cache.transfer.join import JoinReport, join_caches, plan_join
from craftcli.errors import CraftError

IMAGE = "inputs/observation.images.top"
TEACHER = replace(made.manifests.TEACHER, weights_digest="w" * 64)
DATASET = replace(made.manifests.DATASET, root="/data")
MANIFEST = made.manifests.make_manifest(
    rows=6,
    pooling="vision_text",
    teacher=TEACHER,
    dataset=DATASET,
    versions={"torch": "2.11"},
)


def make(
    path: Path,
    *,
    index: list[int] | None = None,
    tasks: tuple[str, ...] = ("push",),
    task: int = 0,
    seed: int = 0,
    image: tuple[int, ...] = (3, 2, 2),
    changed: Rows | None = None,
    **changes: Any,
) -> Path:
    index = list(range(6)) if index is None else index
    manifest = replace(MANIFEST, **{"rows": len(index), **changes})
    arrays = required_arrays(manifest) | {IMAGE: ArraySpec(shape=image, dtype="uint8")}
    rows = random_rows(manifest, arrays, seed)
    rows["valid"][:] = True
    rows["index/task"][:] = task
    rows["index/dataset_index"] = np.array(index, np.int64)
    rows |= changed or {}
    write_rows(path, manifest, arrays, rows, tasks=tasks)
    return path


def join(output: Path, *paths: Path, **options: Any) -> tuple[JoinReport, CacheReader]:
    plan = plan_join(paths, **options)
    seen: list[int] = []
    report = join_caches(plan, output, overwrite=False, on_rows=seen.append)
    assert sum(seen) == report.rows == plan.manifest.rows
    reader = CacheReader.open(output)
    assert reader.verify() == []
    return report, reader


def task_names(reader: CacheReader) -> list[str]:
    return [reader.tasks[number] for number in reader.read_all("index/task")]


def digest(values: list[int]) -> str:
    return hashlib.sha256(" ".join(map(str, values)).encode()).hexdigest()


def test_rows_follow_each_other_and_tasks_are_united(tmp_path: Path) -> None:
    a = make(tmp_path / "a", tasks=("push", "pull"), task=1)
    b = make(tmp_path / "b", index=[9, 8, 7], tasks=("open", "pull", "push"), task=2, seed=1)
    c = make(tmp_path / "c", index=[20], tasks=("open",), seed=2)
    report, reader = join(tmp_path / "all", a, b, c)
    sources = [CacheReader.open(path) for path in (a, b, c)]
    assert reader.array_names() == sources[0].array_names()
    for name in set(reader.array_names()) - {"index/task"}:
        expected = np.concatenate([source.read_all(name) for source in sources])
        assert np.array_equal(reader.read_all(name), expected)
        assert reader.spec(name) == sources[0].spec(name)
    assert reader.tasks == ("push", "pull", "open")
    assert task_names(reader) == ["pull"] * 6 + ["push"] * 3 + ["open"]
    assert (report.rows, report.duplicates, report.source_rows) == (10, 0, [6, 3, 1])


def test_the_manifest_of_one_dataset_is_kept(tmp_path: Path) -> None:
    a = make(tmp_path / "a", index=[5, 3])
    teacher = replace(TEACHER, source="elsewhere", revision="main")
    b = make(tmp_path / "b", index=[4, 3], teacher=teacher, versions={"torch": "2.12"}, seed=7)
    report, reader = join(tmp_path / "c", a, b)
    assert reader.manifest == replace(
        MANIFEST,
        rows=3,
        rows_per_chunk=3,
        sampling="indices",
        dataset=replace(DATASET, selection_digest=digest([5, 3, 4])),
        versions={"torch": "2.11, 2.12"},
        stats_digests=reader.manifest.stats_digests,
    )
    assert reader.manifest.stats_digests
    assert report.duplicates == 1


def test_statistics_are_those_of_all_rows(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a"), make(tmp_path / "b", index=[10, 11], seed=1)
    _, reader = join(tmp_path / "c", a, b)
    states = reader.read_all("hidden/vlm.2").astype(np.float64)
    mask = reader.read_all("hidden_mask")[:, 0]
    stats = reader.stats("vlm.2")
    assert stats.count[0] == mask.sum()
    assert np.allclose(stats.mean[0], states[mask, 0].mean(axis=0))


def test_a_frame_is_kept_once_unless_asked_otherwise(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", index=[1, 2, 3]), make(tmp_path / "b", index=[3, 4, 1], seed=1)
    report, reader = join(tmp_path / "c", a, b)
    assert report.duplicates == 2
    assert reader.read_all("index/dataset_index").tolist() == [1, 2, 3, 4]
    first = CacheReader.open(a).read_all("hidden/vlm.2")
    assert np.array_equal(reader.read_all("hidden/vlm.2")[:3], first)
    report, reader = join(tmp_path / "d", a, b, keep_duplicates=True)
    assert (report.duplicates, report.rows) == (0, 6)


def test_the_same_frame_under_another_instruction_is_another_row(tmp_path: Path) -> None:
    a = make(tmp_path / "a", index=[1, 2], tasks=("push",), prompts_digest="x")
    b = make(tmp_path / "b", index=[1, 2], tasks=("shove", "push"), prompts_digest="y")
    report, reader = join(tmp_path / "c", a, b)
    assert (report.duplicates, task_names(reader)) == (0, ["push"] * 2 + ["shove"] * 2)
    assert reader.manifest.prompts_digest not in (None, "x", "y")
    # Merged once more with one of its sources, nothing comes twice and nothing is lost.
    report, _ = join(tmp_path / "d", tmp_path / "c", b)
    assert (report.duplicates, report.rows) == (2, 4)


def test_of_a_frame_that_comes_twice_the_valid_row_stays(tmp_path: Path) -> None:
    broken: Rows = {
        "valid": np.array([True, False]),
        "hidden/vlm.2": np.full((2, 2, 3), np.nan, np.float32),
        "hidden_mask": np.array([[False, False], [True, True]]),
    }
    a = make(tmp_path / "a", index=[1, 2], changed=broken)
    b = make(tmp_path / "b", index=[2, 3], seed=1)
    report, reader = join(tmp_path / "c", a, b)
    assert report.duplicates == 1
    assert reader.read_all("index/dataset_index").tolist() == [1, 2, 3]
    assert reader.read_all("valid").all()


def test_an_invalid_row_may_have_any_task(tmp_path: Path) -> None:
    odd: Rows = {"valid": np.array([True, False]), "index/task": np.array([0, 99])}
    a = make(tmp_path / "a", index=[1, 2], changed=odd)
    _, reader = join(tmp_path / "c", a, make(tmp_path / "b", index=[3], tasks=("open",)))
    assert reader.read_all("valid").tolist() == [True, False, True]
    assert task_names(reader)[0::2] == ["push", "open"]


def test_different_datasets_make_a_mixed_one(tmp_path: Path) -> None:
    other = replace(DATASET, repo_id="a/new", fingerprint="g", episodes=2, frames=7, root=None)
    a, b = make(tmp_path / "a"), make(tmp_path / "b", dataset=other, seed=1)
    report, reader = join(tmp_path / "c", a, b)
    # The same index is another frame there.
    assert (report.duplicates, report.datasets) == (0, "a/old+a/new")
    dataset = reader.manifest.dataset
    assert (dataset.repo_id, dataset.episodes, dataset.frames) == ("a/old+a/new", 7, 107)
    assert (dataset.root, dataset.fingerprint[:6]) == (None, "mixed:")
    _, swapped = join(tmp_path / "d", b, a)
    assert swapped.manifest.dataset.fingerprint == dataset.fingerprint
    # An index of the mixed cache names no frame any more, so that nothing is taken for a duplicate.
    report, reader = join(tmp_path / "e", tmp_path / "c", a)
    assert (report.duplicates, report.rows) == (0, 18)
    assert reader.manifest.dataset.repo_id == "a/old+a/new"


def test_images_by_reference_need_one_dataset(tmp_path: Path) -> None:
    other = replace(DATASET, repo_id="a/new", fingerprint="g")
    a = make(tmp_path / "a", images="reference")
    b = make(tmp_path / "b", images="reference", dataset=other)
    with pytest.raises(CraftError, match=r"a/old and a/new.*--images embed"):
        plan_join([a, b])
    c = make(tmp_path / "c", images="reference", index=[50])
    assert plan_join([a, c]).manifest.dataset.fingerprint == "f"


UNKNOWN = replace(TEACHER, weights_digest="", config_digest="", processor_digest="")


def test_imported_caches_are_joined_when_they_name_the_same_teacher(tmp_path: Path) -> None:
    dataset = replace(DATASET, fingerprint="")
    a, b = (make(tmp_path / n, teacher=UNKNOWN, dataset=dataset) for n in ("a", "b"))
    report, reader = join(tmp_path / "c", a, b)
    # Row numbers are no frames, and what is unknown stays unknown.
    assert (report.rows, reader.manifest.dataset.fingerprint) == (12, "")
    assert reader.manifest.dataset.repo_id == "a/old"
    c = make(tmp_path / "d", teacher=replace(UNKNOWN, source="x"), dataset=dataset)
    with pytest.raises(CraftError, match=r"teacher.source \(a/b and x\)"):
        plan_join([a, c])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"teacher": replace(TEACHER, weights_digest="x" * 64)}, "teacher.weights_digest"),
        ({"teacher": replace(TEACHER, processor_digest="x")}, "teacher.processor_digest"),
        ({"teacher": UNKNOWN}, "teacher.weights_digest .*unknown"),
        ({"stack": "expert"}, "stack"),
        ({"layers": (1, 3)}, r"layers \(\[2, 3\] and \[1, 3\]\)"),
        ({"layer_count": 5}, "layer_count"),
        ({"pooling": "last_token"}, "pooling"),
        ({"vectors": 1}, "vectors"),
        ({"dim": 4}, "dim"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"images": "reference"}, "images"),
        ({"kinds": ("hidden", "action")}, "kinds"),
        ({"image": (3, 4, 4)}, f"array {IMAGE}"),
        ({"dim": 4, "pooling": "last_token"}, "pooling.*dim"),
    ],
)
def test_what_differs_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    a, b = make(tmp_path / "a"), make(tmp_path / "b", **changes)
    with pytest.raises(CraftError, match=named):
        plan_join([a, b])


def test_several_teachers_are_joined_if_asked_for(tmp_path: Path) -> None:
    later = replace(TEACHER, source="later", weights_digest="x" * 64)
    a = make(tmp_path / "a")
    b = make(tmp_path / "b", index=[4, 5, 6, 7], teacher=later, seed=1)
    with pytest.raises(CraftError, match="add --several-teachers"):
        plan_join([a, b])
    report, reader = join(tmp_path / "c", a, b, several_teachers=True)
    # A frame that both have is held to the earlier teacher.
    assert (report.rows, report.duplicates) == (8, 2)
    layer = reader.array_names()[0]
    earlier = CacheReader.open(a).read_all(layer)
    assert np.array_equal(reader.read_all(layer)[:6], earlier)
    teacher = reader.manifest.teacher
    assert teacher.source == f"{TEACHER.source}+later"
    assert teacher.weights_digest.startswith("mixed:")
    assert teacher.config_digest == TEACHER.config_digest
    # A third can be joined to them.
    third = make(
        tmp_path / "d", index=[9], teacher=replace(TEACHER, source="last", weights_digest="y" * 64)
    )
    _, all_three = join(tmp_path / "e", tmp_path / "c", third, several_teachers=True)
    assert all_three.manifest.teacher.source == f"{TEACHER.source}+later+last"


@pytest.mark.parametrize(
    "changes", [{"config_digest": "x"}, {"processor_digest": "x"}, {"policy_type": "act"}]
)
def test_only_the_weights_of_several_teachers_may_differ(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    other = replace(TEACHER, weights_digest="x" * 64, **changes)
    a, b = make(tmp_path / "a"), make(tmp_path / "b", teacher=other)
    with pytest.raises(CraftError, match=rf"teacher\.{next(iter(changes))}"):
        plan_join([a, b], several_teachers=True)


def test_one_cache_is_not_enough(tmp_path: Path) -> None:
    with pytest.raises(CraftError, match="two or more"):
        plan_join([make(tmp_path / "a")])


def test_a_damaged_source_leaves_nothing_behind(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a"), make(tmp_path / "b", index=[50, 51, 52, 53, 54])
    file = b / "hidden/vlm.2/c/1/0/0"
    plan = plan_join([a, b])
    damaged = bytearray(file.read_bytes())
    damaged[0] ^= 1
    file.write_bytes(damaged)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CraftError, match="damaged"):
        join_caches(plan, tmp_path / "c", overwrite=False, on_rows=lambda _: None)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_source_may_be_replaced_by_the_result(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a"), make(tmp_path / "b", index=[50])
    join_caches(plan_join([a, b]), a, overwrite=True, on_rows=lambda _: None)
    reader = CacheReader.open(a)
    assert (reader.manifest.rows, reader.verify()) == (7, [])


def test_memory_is_bounded_by_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("craftcli.cache.transfer.join.rows_per_chunk", lambda widest, rows: 3)
    wide = (3, 128, 128)
    a = make(tmp_path / "a", index=list(range(20)), image=wide)
    b = make(tmp_path / "b", index=list(range(20, 40)), image=wide)
    plan = plan_join([a, b])
    tracemalloc.start()
    join_caches(plan, tmp_path / "c", overwrite=False, on_rows=lambda _: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The source's chunks are four rows, the result's three.
    assert peak < 40 * np.prod(wide) / 2


@settings(deadline=None, derandomize=True, max_examples=7)
@given(
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    rows=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    chunks=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
)
def test_an_export_of_joined_caches_has_the_rows_of_both(
    dtype: str, rows: tuple[int, int], chunks: tuple[int, int, int]
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        rows_per_chunk = "craftcli.cache.transfer.join.rows_per_chunk"
        patch.setattr(rows_per_chunk, lambda widest, rows: chunks[2])
        folder = Path(name)
        spread = np.split(np.random.default_rng(sum(rows)).permutation(sum(rows)), [rows[0]])
        paths = [
            make(
                folder / f"{i}", index=part.tolist(), seed=i, dtype=dtype, rows_per_chunk=chunks[i]
            )
            for i, part in enumerate(spread)
        ]
        join(folder / "both", *paths)
        plan = plan_export(folder / "both")
        export_cache(plan, folder / "out", overwrite=False, on_rows=lambda _: None)
        sources = [CacheReader.open(path) for path in paths]
        with safe_open(folder / "out", framework="pt") as file:
            assert sorted(file.keys()) == sources[0].array_names()
            for array in file.keys():  # noqa: SIM118  # a safetensors file is no dict
                expected = np.concatenate([source.read_all(array) for source in sources])
                got = file.get_tensor(array)
                if array.startswith("hidden/"):
                    assert str(got.dtype) == f"torch.{dtype}"
                assert raw(got) == expected.tobytes()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
