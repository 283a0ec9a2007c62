"""Damaged files are found before their rows are used."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made.damage import empty, flip, truncate

from craftcli.cache.reading.reader import CacheReader
from craftcli.errors import CraftError


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip, "the checksum does not match"),
        (truncate, "bytes instead of"),
        (empty, "has 0 bytes"),
        (Path.unlink, "the file is missing"),
    ],
)
@pytest.mark.parametrize("name", ["hidden/vlm.3", "inputs/observation.images.top"])
def test_a_damaged_chunk_is_found(
    cache: Path, name: str, damage: Callable[[Path], None], problem: str
) -> None:
    damage(next(file for file in (cache / name / "c/2").rglob("*") if file.is_file()))
    reader = CacheReader.open(cache)
    (found,) = reader.verify()
    assert found.startswith(f"{name} chunk 2 (rows 8 to 9): ")
    assert problem in found
    reader.read(name, np.arange(8))
    with pytest.raises(CraftError, match=r"chunk 2 \(rows 8 to 9\)") as caught:
        reader.read(name, np.array([0, 9]))
    assert name in caught.value.why
    assert "craft cache inspect" in caught.value.fix
    with pytest.raises(CraftError, match="is damaged"):
        reader.read_all(name)


def test_swapped_chunks_are_found_by_the_commit_records(cache: Path) -> None:
    shutil.copy(cache / "hidden/vlm.3/c/0/0/0", cache / "hidden/vlm.3/c/1/0/0")
    (found,) = CacheReader.open(cache).verify()
    assert found.startswith("commit chunk 1 (rows 4 to 7): ")


@pytest.mark.parametrize("name", ["commit/c/1", "stats/vlm.2/variance/c/0/0"])
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_damage_beside_the_rows_is_found(
    cache: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(cache / name)
    (found,) = CacheReader.open(cache).verify()
    assert found.startswith(name.split("/c/")[0])


def test_damaged_statistics_are_not_returned(cache: Path) -> None:
    flip(cache / "stats/vlm.2/mean/c/0/0")
    with pytest.raises(CraftError, match=r"stats/vlm\.2/mean"):
        CacheReader.open(cache).stats("vlm.2")
