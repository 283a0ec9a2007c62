"""The bytes of a cache do not change between versions of craft: one from before, built anew."""

import json
from pathlib import Path

import numpy as np
import pytest
from made.files import tree
from made.fixed_cache import TASKS, fixed_arrays, fixed_manifest, fixed_rows
from made.rows import write_rows

from craftcli.cache.format import UNPACKED_VERSION
from craftcli.cache.reading.reader import CacheReader

FIXTURE = Path(__file__).parent / "fixtures/all_kinds.zarr"


@pytest.mark.parametrize("memory", ["ram", "mmap"])
def test_a_cache_of_an_older_craft_opens_and_holds_its_rows(memory: str) -> None:
    reader = CacheReader.open(FIXTURE, memory=memory)
    assert reader.manifest == fixed_manifest()
    assert reader.tasks == tuple(TASKS)
    assert reader.verify() == []
    for name, values in fixed_rows().items():
        np.testing.assert_array_equal(reader.read(name, np.arange(len(values))), values)


def test_the_same_rows_give_the_same_bytes_and_a_manifest_with_seals(tmp_path: Path) -> None:
    path = tmp_path / "anew.zarr"
    write_rows(path, fixed_manifest(), fixed_arrays(), fixed_rows(), tasks=TASKS)
    old, new = tree(FIXTURE), tree(path)
    assert sorted(old) == sorted(new)
    assert [name for name, content in old.items() if new[name] != content] == ["zarr.json"]
    before, after = (json.loads(files["zarr.json"] or b"") for files in (old, new))
    assert after["attributes"]["craft"].pop("format_version") == UNPACKED_VERSION
    assert before["attributes"]["craft"].pop("format_version") == "1.1"
    digests = after["attributes"]["craft"].pop("stats_digests")
    assert sorted(digests) == ["vlm.2", "vlm.3"]
    assert before["attributes"].pop("digest") != after["attributes"].pop("digest")
    assert before == after


def test_an_older_cache_says_that_its_statistics_are_not_sealed() -> None:
    assert CacheReader.open(FIXTURE).stats_sealed is False
