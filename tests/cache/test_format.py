import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made.manifests import DATASET, make_manifest

from craftcli.cache.format import Manifest, layer_names, rows_per_chunk, version_of
from craftcli.errors import CraftError

make_full = partial(
    make_manifest,
    dtype="float16",
    dataset=replace(DATASET, root="/data/old"),
    versions={"zarr": "3.4.2"},
)


def test_a_manifest_survives_json() -> None:
    manifest = make_full()
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


@pytest.mark.parametrize("name", ["rows", "layers", "teacher", "sampling"])
def test_a_missing_field_is_named(name: str) -> None:
    data = make_full().to_json()
    del data[name]
    with pytest.raises(CraftError, match=f"field {name} is missing"):
        Manifest.from_json(data)


def test_every_problem_is_named_at_once() -> None:
    data = make_full().to_json()
    data["rowz"] = data.pop("rows")
    data["teacher"]["source"] = 3
    del data["dataset"]["frames"]
    with pytest.raises(CraftError) as caught:
        Manifest.from_json(data)
    assert "field rows is missing" in caught.value.why
    assert "field rowz is unknown (close to rows)" in caught.value.why
    assert "field teacher.source is 3, not a string" in caught.value.why
    assert "field dataset.frames is missing" in caught.value.why


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("rows", "10", "not an integer"),
        ("rows", True, "not an integer"),
        ("rows", 10.0, "not an integer"),
        ("rows", None, "not an integer"),
        ("complete", 1, "not true or false"),
        ("layers", 3, "not a list"),
        ("layers", [2, "3"], r"field layers\[1\] is '3', not an integer"),
        ("teacher", "a/b", "not an object"),
        ("versions", {"zarr": 3}, "field versions.zarr is 3, not a string"),
        ("versions", [], "not an object"),
        ("rows", 0, "not at least 1"),
        ("dtype", "float64", "not one of float32, float16, bfloat16"),
        ("kinds", ["hiden"], "not one of hidden"),
        ("kinds", [], "field kinds is empty"),
        ("images", "somewhere", "not one of reference, embedded"),
        ("layers", [4], "not in 0..3"),
        ("layers", [-1], "not in 0..3"),
        ("layers", [2, 2], "repeats a layer"),
        ("layers", [], "field layers is empty"),
        ("stack", "a/b", "not a name without /"),
        ("format_version", "one", "major.minor"),
        ("format_version", 1.0, "major.minor"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any, problem: str) -> None:
    with pytest.raises(CraftError, match=problem):
        Manifest.from_json(make_full().to_json() | {name: value})


@pytest.mark.parametrize("data", [None, [], "craft"])
def test_something_else_than_an_object_is_refused(data: Any) -> None:
    with pytest.raises(CraftError, match="not an object"):
        Manifest.from_json(data)


def test_a_newer_major_version_is_refused_even_when_its_fields_are_foreign() -> None:
    with pytest.raises(CraftError, match="newer craft") as caught:
        Manifest.from_json({"format_version": "3.0", "something": "else"})
    assert "upgrade craft" in caught.value.fix


def test_a_newer_minor_version_may_add_fields_anywhere() -> None:
    data = make_full().to_json() | {"format_version": "1.7", "extra": [1]}
    data["teacher"]["extra"] = 1
    assert Manifest.from_json(data) == make_full(format_version="1.7")
    data = make_full(packed=("hidden/vlm.2",)).to_json() | {"format_version": "2.7", "extra": [1]}
    assert Manifest.from_json(data).packed == ("hidden/vlm.2",)


def test_only_packed_caches_are_closed_to_earlier_versions_of_craft() -> None:
    assert version_of(make_full()) == "1.3"
    assert version_of(make_full(packed=("hidden/vlm.2",))) == "2.0"


@settings(deadline=None, derandomize=True, max_examples=50)
@given(rows=st.integers(1, 60), chunk=st.integers(1, 70))
def test_chunks_cover_every_row_once(rows: int, chunk: int) -> None:
    manifest = make_full(rows=rows, rows_per_chunk=chunk)
    covered = [
        row for k in range(manifest.chunk_count) for row in range(rows)[manifest.chunk_rows(k)]
    ]
    assert covered == list(range(rows))
    with pytest.raises(IndexError):
        manifest.chunk_rows(manifest.chunk_count)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(size=st.integers(1, 2**32), rows=st.integers(1, 10**7))
@example(size=2048, rows=55)  # whole pages would be 56 rows
def test_a_chunk_is_at_most_the_target_or_one_row(size: int, rows: int) -> None:
    chunk = rows_per_chunk(size, rows)
    assert 1 <= chunk <= rows
    assert chunk == 1 or chunk * size <= 16 * 1024**2
    chunks = -(-rows // chunk)
    assert chunks == -(-rows // max(1, 16 * 1024**2 // size))
    assert chunks * chunk - rows <= max(chunks - 1, rows / 32)


def test_layer_names_follow_the_manifest() -> None:
    assert layer_names(make_full(layers=(3, 0))) == ["vlm.3", "vlm.0"]


def test_the_format_needs_the_standard_library_only() -> None:
    code = (
        "import sys, craftcli.cache.format as f; assert f;"
        "assert not {'numpy', 'zarr', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"stack": "x" * 10_000_000},
        {"versions": {"x" * 10_000_000: "1"}},
        {"versions": {"torch": "x" * 10_000_000}},
        {"layers": [1] * 1_000_000},
        {"format_version": "9" * 10_000_000},
        {"rows": "x" * 10_000_000},
        {f"field{i}": 1 for i in range(4000)},
    ],
)
def test_an_absurd_manifest_is_refused_without_showing_it(changes: dict[str, Any]) -> None:
    with pytest.raises(CraftError, match="Cache manifest is not valid") as caught:
        Manifest.from_json(make_manifest().to_json() | changes)
    assert len(str(caught.value)) < 2000
