"""Metadata that no craft writes: refused, and not shown."""

import json
from pathlib import Path
from typing import Any

import pytest
from made.manifests import make_manifest
from made.rows import random_rows, write_rows

from craftcli.cache.storage.zarr_layout import attributes_digest, open_cache, required_arrays
from craftcli.errors import CraftError


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    manifest = make_manifest()
    arrays = required_arrays(manifest)
    rows = random_rows(manifest, arrays)
    write_rows(tmp_path / "a.zarr", manifest, arrays, rows, tasks=["a", "b"])
    return tmp_path / "a.zarr"


def edit(file: Path, **attributes: Any) -> None:
    metadata = json.loads(file.read_text())
    metadata["attributes"] |= attributes
    if "craft" in metadata["attributes"]:
        metadata["attributes"]["digest"] = attributes_digest(metadata["attributes"])
    file.write_text(json.dumps(metadata))


@pytest.mark.parametrize(
    ("file", "attributes"),
    [
        ("zarr.json", {"tasks": ["x" * 10_000_000, "b"]}),
        ("zarr.json", {"more": "x" * 20_000_000}),
        ("zarr.json", {"arrays": {"x" * 10_000_000: {}}}),
        ("valid/zarr.json", {"craft_dtype": "x" * 10_000_000}),
    ],
)
def test_long_texts(cache: Path, file: str, attributes: dict[str, Any]) -> None:
    edit(cache / file, **attributes)
    with pytest.raises(CraftError) as caught:
        open_cache(cache)
    assert len(str(caught.value)) < 2000


def test_deep_nesting(cache: Path) -> None:
    (cache / "zarr.json").write_text('{"attributes": ' + "[" * 200_000)
    with pytest.raises(CraftError, match="not a craft cache"):
        open_cache(cache)
