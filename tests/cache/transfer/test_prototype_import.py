"""Importing the prototypes' folders: all kinds, exact values, and no code run from a pickle."""

import itertools
import json
import os
import pickle
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from craftcli.cache.inputs import unpack
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.transfer import prototype_files as prototypes
from craftcli.cache.transfer.prototype_import import (
    ImportReport,
    import_prototype,
    survey_prototype,
)
from craftcli.cache.transfer.rechunk import regroup
from craftcli.errors import CraftError

ROWS = (5, 5, 2)
"""Rows of the shards."""
METADATA: dict[str, Any] = {
    "teacher_policy_path": "physical-intelligence/pi0-fast",
    "dataset_repo_id": "lerobot/aloha",
    "seed": 42,
}


def bytes_image(rows: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, 3, 4, 4)).to(torch.uint8).float() / 255


def features(rows: int) -> torch.Tensor:
    return torch.randn(rows, 8).half()


def two_layers(rows: int) -> torch.Tensor:
    return torch.randn(rows, 2, 2, 8)


def labels(rows: int) -> torch.Tensor:
    values = torch.randint(0, 1000, (rows, 6))
    values[:, :2] = -100
    return values


TARGETS: dict[str, Callable[[int], torch.Tensor]] = {
    "target_features": features,
    "teacher_hidden": two_layers,
    "labels": labels,
}


def shard(rows: int, target: str = "target_features", **changes: Any) -> dict[str, Any]:
    return {
        "pixel_values": torch.rand(rows, 3, 4, 4) * 2 - 1,
        "input_ids": torch.randint(0, 1000, (rows, 6)),
        "attention_mask": torch.ones(rows, 6, dtype=torch.int64),
        target: TARGETS[target](rows),
        "meta": {"n_vecs": 2},
        "prompts": ["pick up"] * rows,
    } | changes


def write_folder(folder: Path, shards: list[Any], **metadata: Any) -> Path:
    folder.mkdir()
    (folder / "metadata.json").write_text(json.dumps(METADATA | metadata))
    for number, content in enumerate(shards):
        torch.save(content, folder / f"shard_{number:04d}.pt")
    return folder


def run(folder: Path, output: Path, **options: Any) -> tuple[ImportReport, CacheReader]:
    contents = survey_prototype(folder, **options)
    seen: list[int] = []
    report = import_prototype(contents, output, overwrite=False, on_rows=seen.append)
    assert sum(seen) == report.rows
    reader = CacheReader.open(output)
    assert reader.verify() == []
    return report, reader


def joined(shards: list[dict[str, Any]], name: str) -> torch.Tensor:
    return torch.cat([content[name] for content in shards])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("count", ["num_samples", "num_anchors"])
@pytest.mark.parametrize("target", list(TARGETS))
def test_every_kind_and_both_counts_are_read_exactly(
    tmp_path: Path, target: str, count: str
) -> None:
    shards = [shard(rows, target) for rows in ROWS]
    folder = write_folder(tmp_path / "old", shards, **{count: 12, "pooling": "mean_masked"})
    report, reader = run(folder, tmp_path / "new.zarr")
    assert (report.rows, report.invalid_rows) == (12, 0)
    for name in ("pixel_values", "input_ids", "attention_mask"):
        stored = unpack(reader.read_all(f"inputs/{name}"), reader.spec(f"inputs/{name}").attributes)
        assert torch.equal(stored, joined(shards, name))
    values = joined(shards, target).numpy()
    if target == "labels":
        assert reader.manifest.kinds == ("token_ce",)
        assert np.array_equal(reader.read_all("outputs/labels"), values)
        assert not any(name.startswith("hidden") for name in reader.array_names())
    else:
        assert reader.manifest.kinds == ("hidden",)
        stack = values.reshape(12, len(reader.manifest.layers), reader.manifest.vectors, 8)
        for place, layer in enumerate(reader.manifest.layers):
            assert np.array_equal(reader.read_all(f"hidden/vlm.{layer}"), stack[:, place])
        assert reader.read_all("hidden_mask").all()
    assert reader.read_all("index/dataset_index").tolist() == list(range(12))
    assert reader.tasks == ("imported",)
    assert sorted(os.listdir(tmp_path)) == ["new.zarr", "old"]


def test_what_is_not_on_record_stays_unknown(tmp_path: Path) -> None:
    _, reader = run(write_folder(tmp_path / "old", [shard(3)]), tmp_path / "new.zarr")
    manifest = reader.manifest
    assert (manifest.teacher.source, manifest.dataset.repo_id, manifest.seed) == (
        "physical-intelligence/pi0-fast",
        "lerobot/aloha",
        42,
    )
    teacher = manifest.teacher
    assert (teacher.weights_digest, teacher.config_digest, teacher.processor_digest) == ("",) * 3
    assert manifest.dataset.fingerprint == ""
    assert (manifest.pooling, manifest.layers, manifest.images) == ("unknown", (0,), "embedded")


def test_metadata_may_be_empty(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "old", [shard(3)])
    (folder / "metadata.json").write_text("{}")
    _, reader = run(folder, tmp_path / "new.zarr")
    assert (reader.manifest.teacher.source, reader.manifest.dataset.repo_id) == ("old", "old")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_hidden_states_keep_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    content = shard(4, target_features=torch.randn(4, 8).to(dtype))
    _, reader = run(write_folder(tmp_path / "old", [content]), tmp_path / "new.zarr")
    assert reader.manifest.dtype == str(dtype).removeprefix("torch.")
    stored = torch.from_numpy(reader.read_all("hidden/vlm.0"))
    if dtype is torch.bfloat16:
        stored = stored.view(dtype)
    assert torch.equal(stored[:, 0], content["target_features"])


@pytest.mark.parametrize(
    ("layer", "depth", "stored"),
    [(-2, 18, 16), (-1, 18, 17), (-1, 4, 3), (1, 18, 0), (18, 18, 17)],
)
def test_a_single_layer_is_counted_as_the_builder_did(
    tmp_path: Path, layer: int, depth: int, stored: int
) -> None:
    # It indexed transformers' hidden_states, where the embedding is number 0.
    folder = write_folder(tmp_path / "old", [shard(3)], hidden_layer=layer)
    assert survey_prototype(folder, layer_count=depth).targets.layers == (stored,)
    assert survey_prototype(folder, layer_count=depth).targets.layers_known


@pytest.mark.parametrize(
    ("metadata", "meta", "stored"),
    [
        ({"layers_to_save": [-2, -1]}, {}, (16, 17)),
        ({"layers_to_save": [3, 5]}, {}, (3, 5)),
        ({"hidden_layers": [0, -1]}, {}, (0, 17)),
        ({"layers_to_save": [-2, -1]}, {"layers_to_save": [10, 11]}, (10, 11)),
        ({}, {}, (0, 1)),
    ],
)
def test_several_layers_are_those_the_shards_name(
    tmp_path: Path, metadata: dict[str, Any], meta: dict[str, Any], stored: tuple[int, ...]
) -> None:
    folder = write_folder(tmp_path / "old", [shard(3, "teacher_hidden", meta=meta)], **metadata)
    targets = survey_prototype(folder).targets
    assert (targets.layers, targets.pooling, targets.vectors) == (stored, "vision_text", 2)
    assert targets.layers_known == bool(metadata)


@pytest.mark.parametrize(
    ("target", "metadata", "said"),
    [
        ("target_features", {"hidden_layer": 0}, "embedding"),
        ("target_features", {"hidden_layer": -19}, "embedding"),
        ("target_features", {"hidden_layer": 19}, "18 layers"),
        ("target_features", {"hidden_layer": "last"}, "hidden_layer is 'last'"),
        ("teacher_hidden", {"layers_to_save": [-1]}, "holds 2"),
        ("teacher_hidden", {"layers_to_save": [-1, "x"]}, "whole numbers"),
        ("target_features", {"hidden_layer": True}, "hidden_layer is True"),
    ],
)
def test_layers_that_cannot_be_right_are_refused(
    tmp_path: Path, target: str, metadata: dict[str, Any], said: str
) -> None:
    folder = write_folder(tmp_path / "old", [shard(3, target)], **metadata)
    with pytest.raises(CraftError, match=said):
        survey_prototype(folder)


def test_images_become_bytes_only_when_all_of_them_are(tmp_path: Path) -> None:
    exact = [shard(rows, pixel_values=bytes_image(rows)) for rows in (3, 2)]
    _, reader = run(write_folder(tmp_path / "a", exact), tmp_path / "a.zarr")
    spec = reader.spec("inputs/pixel_values")
    assert spec.dtype == "uint8"
    stored = unpack(reader.read_all("inputs/pixel_values"), spec.attributes)
    assert torch.equal(stored, joined(exact, "pixel_values"))
    # One shard alone decides otherwise, wherever it comes.
    mixed = [exact[0], shard(2), exact[1]]
    _, reader = run(write_folder(tmp_path / "b", mixed), tmp_path / "b.zarr")
    assert reader.spec("inputs/pixel_values").dtype == "float32"
    assert np.array_equal(reader.read_all("inputs/pixel_values"), joined(mixed, "pixel_values"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("target", ["target_features", "teacher_hidden"])
def test_rows_that_are_not_finite_are_marked_and_counted(
    tmp_path: Path, target: str, bad: float
) -> None:
    first, second = shard(3, target), shard(3, target)
    first[target].view(3, -1)[1, -1] = bad
    second["pixel_values"][2, 0, 0, 0] = bad
    report, reader = run(write_folder(tmp_path / "old", [first, second]), tmp_path / "new.zarr")
    assert report.invalid_rows == 2
    assert reader.read_all("valid").tolist() == [True, False, True, True, True, False]
    assert reader.stats(f"vlm.{reader.manifest.layers[0]}").count.tolist()[0] == 4


def test_a_row_without_a_label_is_not_valid(tmp_path: Path) -> None:
    content = shard(3, "labels")
    content["labels"][1] = -100
    report, reader = run(write_folder(tmp_path / "old", [content]), tmp_path / "new.zarr")
    assert (report.invalid_rows, reader.read_all("valid").tolist()) == (1, [True, False, True])


def test_a_wrong_count_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "old", [shard(5), shard(2)], num_anchors=100)
    with pytest.raises(CraftError, match=r"num_anchors = 100, and the shards hold 7 rows"):
        survey_prototype(folder)
    report, _ = run(folder, tmp_path / "new.zarr", trust_rows=True)
    assert report.rows == 7


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return open, (str(self._file), "w")


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("where", ["in a shard", "a bare pickle"])
def test_a_hostile_pickle_does_nothing(tmp_path: Path, where: str) -> None:
    trap = tmp_path / "trap"
    folder = write_folder(tmp_path / "old", [shard(3), shard(3)])
    file = folder / "shard_0001.pt"
    if where == "in a shard":
        torch.save(shard(3, meta=Hostile(trap)), file)
    else:
        file.write_bytes(pickle.dumps(Hostile(trap)))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CraftError, match="shard_0001") as refused:
        survey_prototype(folder)
    assert sorted(tmp_path.rglob("*")) == before
    assert not trap.exists()
    assert "weights_only=False" not in str(refused.value)
    if where == "in a shard":
        assert "io.open" in refused.value.why
        # The trap works: loaded as the prototypes did it, the file is there.
        torch.load(file, weights_only=False)["meta"].close()
        assert trap.exists()


def test_a_shard_that_changed_meanwhile_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "old", [shard(30), shard(3)])
    contents = survey_prototype(folder)
    (folder / "shard_0001.pt").write_bytes(b"gone")
    with pytest.raises(CraftError, match="shard_0001"):
        import_prototype(contents, tmp_path / "new.zarr", overwrite=False, on_rows=lambda _: None)
    assert os.listdir(tmp_path) == ["old"]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def replaced(content: Any) -> Callable[[Path], None]:
    return lambda file: torch.save(content, file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut, "cannot be read"),
        (lambda file: file.write_bytes(b""), "cannot be read"),
        (replaced([1, 2]), "must hold one of"),
        (replaced({"records": []}), "must hold one of"),
        (replaced(shard(3) | {"labels": labels(3)}), "must hold one of"),
        (replaced(shard(3, pixel_values=None)), "no plain tensor pixel_values"),
        (replaced(shard(3, input_ids=torch.zeros(3, 6) * 1j)), "no plain tensor input_ids"),
        (replaced(shard(3, input_ids=torch.zeros(2, 6))), "number of rows"),
        (replaced(shard(3, input_ids=torch.zeros(3, 7))), "input_ids"),
        (replaced(shard(3, "teacher_hidden")), "target_features"),
        (replaced(shard(3, target_features=torch.zeros(3, 9).half())), r"\[9\].* \[8\]"),
        (replaced(shard(3, target_features=torch.zeros(3, 8))), "float32.*float16"),
    ],
)
def test_shards_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    folder = write_folder(tmp_path / "old", [shard(3), shard(3)])
    change(folder / "shard_0001.pt")
    with pytest.raises(CraftError, match=f"shard_0001.*{said}"):
        survey_prototype(folder)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (torch.zeros(3, 8, dtype=torch.float64), "float64"),
        (torch.zeros(3, 2, 8), "2 axes"),
        (torch.zeros(3, 0), "nothing in a row"),
    ],
)
def test_targets_of_another_shape_or_dtype_are_refused(
    tmp_path: Path, target: torch.Tensor, said: str
) -> None:
    folder = write_folder(tmp_path / "old", [shard(3, target_features=target)])
    with pytest.raises(CraftError, match=said):
        survey_prototype(folder)


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "metadata.json cannot be read"),
        (lambda folder: write_folder(folder, []), "no shard_0000.pt"),
        (lambda folder: write_folder(folder, [shard(0)]), "no rows"),
    ],
)
def test_a_folder_without_a_cache_is_refused(
    tmp_path: Path, prepare: Callable[[Path], Any], said: str
) -> None:
    prepare(tmp_path / "old")
    with pytest.raises(CraftError, match=said):
        survey_prototype(tmp_path / "old")


def test_shards_come_by_number_not_by_name(tmp_path: Path) -> None:
    contents = [shard(1) for _ in range(11)]
    folder = write_folder(tmp_path / "old", contents)
    for number in range(11):
        (folder / f"shard_{number:04d}.pt").rename(folder / f"shard_{number}.pt")
    _, reader = run(folder, tmp_path / "new.zarr")
    assert np.array_equal(reader.read_all("inputs/input_ids"), joined(contents, "input_ids"))


def test_memory_is_bounded_by_shards_and_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = torch.rand(4, 3, 64, 64)
    folder = write_folder(tmp_path / "old", [shard(4, pixel_values=wide) for _ in range(12)])
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    def load_shard(path: Path) -> Any:
        nonlocal most
        loaded = prototypes.Shard(**vars(original(path)))
        alive.add(loaded)
        most = max(most, len(alive))
        return loaded

    original = prototypes.load_shard
    monkeypatch.setattr(prototypes, "load_shard", load_shard)
    chunk_of_3 = "craftcli.cache.transfer.prototype_import.rows_per_chunk"
    monkeypatch.setattr(chunk_of_3, lambda widest, rows: 3)
    contents = survey_prototype(folder)
    tracemalloc.start()
    import_prototype(contents, tmp_path / "new.zarr", overwrite=False, on_rows=lambda _: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most <= 3
    assert peak < 12 * wide.nbytes


@settings(deadline=None, derandomize=True, max_examples=50)
@given(sizes=st.lists(st.integers(0, 9), max_size=8), size=st.integers(1, 7))
def test_regrouped_rows_are_the_same_rows(sizes: list[int], size: int) -> None:
    ends = np.cumsum([0, *sizes])
    parts = [{"a": np.arange(i, j)} for i, j in itertools.pairwise(ends)]
    groups = [group["a"] for group in regroup(parts, size)]
    assert [row for group in groups for row in group] == list(range(sum(sizes)))
    assert all(len(group) == size for group in groups[:-1])
    assert all(0 < len(group) <= size for group in groups)
