from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.chunks import Chunks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def flips(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark of 1,000 flips; the tests make fewer."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import flips

    return flips


@pytest.fixture(params=["whole rows", "packed rows"])
def cache(flips: ModuleType, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    flips.make_cache(tmp_path / "anchors.zarr", packed=request.param == "packed rows")
    return tmp_path / "anchors.zarr"


def test_a_flipped_bit_of_the_payload_is_found_before_a_row_is_read(
    flips: ModuleType, cache: Path
) -> None:
    assert flips.count_missed(cache, 60) == {"verify": 0, "ram": 0, "mmap": 0}
    assert CacheReader.open(cache).verify() == []


def test_a_flipped_bit_of_the_metadata_never_gives_other_rows(
    flips: ModuleType, cache: Path
) -> None:
    outcomes = flips.judge_metadata(cache, 40)
    assert outcomes["other rows"] == 0
    assert outcomes["refused"] > 0


def test_without_checksums_flips_are_missed(
    flips: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_check(*_: Any) -> None:
        pass

    monkeypatch.setattr(Chunks, "check_ending", no_check)
    missed = flips.count_missed(cache, 10)
    assert min(missed.values()) > 0
