"""Every benchmark runs, small, and returns rows of the one table."""

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
NAMES = (
    *("step", "default", "sizes", "read", "size", "build", "rows", "made", "video", "live"),
    "growth",
)


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("all_benchmarks")


@pytest.mark.parametrize("name", NAMES)
def test_a_small_version_of_every_benchmark_runs(benchmarks: Any, name: str) -> None:
    rows = benchmarks.measure(name, quick=True)
    assert rows
    for row in rows:
        assert row.ratio > 0
        assert math.isfinite(row.ratio)
        if row.least is not None:
            assert row.least <= row.ratio <= row.largest


def test_all_benchmarks_are_named(benchmarks: Any) -> None:
    assert tuple(benchmarks.MODULES) == NAMES


def test_every_command_runs_with_lora_weights(benchmarks: Any) -> None:
    """Without them they run among the benchmarks above."""
    import real_size

    (measured,) = real_size.measure_all(["pi0_fast"], quick=True)
    commands = [command.name for command in measured.commands]
    assert commands == ["build", "inspect", "dryrun", "train"]


def test_a_row_shows_its_range_and_its_bound(benchmarks: Any) -> None:
    from table import row_of

    row = row_of("one / other", "processor time", [1.0, 1.2, 1.1], at_most=1.15)
    assert str(row) == "| one / other | processor time | 1.10 | 1.00 to 1.20 | 1.15 |"


def test_growth_is_drawn(benchmarks: Any, tmp_path: Path) -> None:
    from growth import Curve, draw

    from craftcli.plots.png import write_plot

    curve = Curve(of="rows", cost="a batch", sizes=(10, 1000), ratios=(1.0, 30.0))
    write_plot(lambda: draw([curve]), tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 5000
