"""The page and the plots of a comparison."""

import dataclasses
import json
import re
from collections.abc import Callable
from itertools import combinations
from math import dist
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

from craftcli.compare.compare import Comparison, compare_records
from craftcli.compare.curves_plot import draw_curves
from craftcli.compare.report import check_replaced, write_report
from craftcli.compare.runs import Roles, RunRecord
from craftcli.compare.trade_off_plot import MARKER_WIDTH, draw_trade_off, spread_out
from craftcli.errors import CraftError

type Make = Callable[..., Any]

unit = st.floats(0, 1)


@pytest.fixture
def comparison(run_of: Make, teacher_of: Make) -> Comparison:
    runs = [
        run_of("none", old=0.0, new=1.0, arm="<none> & $plain$"),
        *(run_of("hidden", old=1.0, new=1.0, seed=seed, arm="隐藏") for seed in range(2)),
        run_of("action", old=1.0, new=1.0, arm="action"),
    ]
    return compare_records([teacher_of(), *runs], Roles())


@given(st.lists(st.one_of(st.tuples(unit, unit), st.just((1.0, 1.0))), max_size=12))
def test_markers_never_cover_each_other(points: list[tuple[float, float]]) -> None:
    places = spread_out(points)
    assert len(places) == len(points)
    assert all(dist(a, b) >= MARKER_WIDTH for a, b in combinations(places, 2))
    if points:
        assert places[0] == points[0]


def test_the_page_stands_alone(comparison: Comparison, tmp_path: Path) -> None:
    written = write_report(comparison, tmp_path / "report", title="A <title>")
    page = written.page.read_text("utf-8")
    assert {file.name for file in written.files} == {
        "index.html",
        "compare.json",
        "trade_off.png",
        "curves.png",
    }
    assert all(file.is_file() for file in written.files)
    loading = re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)[^\"']*|@import|url\((?!#)", page)
    assert loading == []
    assert "A &lt;title&gt;" in page
    assert "&lt;none&gt; &amp; $plain$" in page
    assert page.count("<svg ") == 2
    assert "demo:green: 1.00" in page
    assert "prefers-color-scheme: dark" in page
    assert "#222222" not in page  # text of the pictures follows light and dark


def test_the_same_figures_give_the_same_page(comparison: Comparison, tmp_path: Path) -> None:
    pages = [
        write_report(comparison, tmp_path / name, title="x").page.read_bytes() for name in "ab"
    ]
    assert pages[0] == pages[1]


def test_the_data_holds_every_figure(comparison: Comparison, tmp_path: Path) -> None:
    write_report(comparison, tmp_path / "report", title="x")
    data = json.loads((tmp_path / "report/compare.json").read_text("utf-8"))
    assert data["arms"][1]["old"]["values"] == [1.0, 1.0]
    assert data["arms"][1]["seeds"] == [0, 1]
    assert data["arms"][0]["nbt"]["mean"] == 1.0
    assert data["environments"] == {"demo:red": "old", "demo:green": "old", "demo:blue": "new"}


def test_without_success_or_training_there_are_no_pictures(
    run_of: Make, comparison: Comparison, tmp_path: Path
) -> None:
    write_report(comparison, tmp_path / "report", title="x")
    bare = compare_records([run_of("none", old=0, new=1, measured=None, metrics=())], Roles())
    written = write_report(bare, tmp_path / "report", title="x")
    names = {file.name for file in (tmp_path / "report").iterdir()}
    assert names == {"index.html", "compare.json"} == {file.name for file in written.files}


def test_many_arms_are_drawn(run_of: Make, tmp_path: Path) -> None:
    runs = [run_of("hidden", old=1.0, new=1.0, arm=f"arm {i}") for i in range(8)]
    written = write_report(compare_records(runs, Roles()), tmp_path / "report", title="x")
    assert all(file.is_file() for file in written.files)


def test_points_of_one_sweep_are_joined_in_its_order(run_of: Make) -> None:
    points = [(1.0, 0.2), (0.3, 0.9), (0.6, 0.5)]
    runs = [
        run_of("hidden", old=old, new=new, arm=f"ε {i}", curve="ε")
        for i, (old, new) in enumerate(points)
    ]
    runs.append(run_of("action", old=0.5, new=0.5, arm="alone"))
    comparison = compare_records(runs, Roles())
    assert [row.arm.hue for row in comparison.arms] == [1, 1, 1, 2]
    curves = draw_curves([row.arm for row in comparison.arms])
    assert curves is not None
    legends = [[t.get_text() for t in row.legends[0].get_texts()] for row in curves.subfigs]
    assert legends == [["1  ε 0", "4  alone"], ["2  ε 1"], ["3  ε 2"]]
    picture = draw_trade_off(comparison)
    assert picture is not None
    lines = [np.asarray(line.get_xydata()).tolist() for line in picture.axes[0].get_lines()]
    (curve,) = (line for line in lines if len(line) > 2)
    assert curve == [[new, old] for old, new in points]


def test_what_was_measured_while_training_has_panels_of_its_own(run_of: Make) -> None:
    plain = run_of("none", old=0.5, new=0.5)
    measured = run_of("hidden", old=0.5, new=0.5)
    points = ({"step": 0, "eval_old_success": 1.0}, {"step": 9, "eval_old_success": 0.5})
    measured = dataclasses.replace(measured, metrics=(*measured.metrics, *points))

    def titles(*runs: RunRecord) -> list[str]:
        comparison = compare_records(list(runs), Roles())
        figure = draw_curves([row.arm for row in comparison.arms])
        assert figure is not None
        return [axes.get_title() for axes in figure.axes]

    assert titles(plain, measured)[5:] == ["measured: old success"]
    assert len(titles(plain)) == 5


def test_a_folder_of_something_else_is_left_alone(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(CraftError, match="Refusing to write into"):
        write_report(comparison, tmp_path, title="x")
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_the_title_of_the_trade_off_is_inside_the_picture(run_of: Make) -> None:
    runs = [run_of(mode, old=0.5, new=0.5) for mode in ("none", "hidden")]
    figure = draw_trade_off(compare_records(runs, Roles()))
    assert figure is not None
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())
    drawn = np.flatnonzero((pixels != pixels[0, 0]).any(axis=(1, 2)))
    # Room for a browser's own, larger letters as well.
    assert drawn[0] >= 10


def test_a_report_of_other_runs_is_not_overwritten(comparison: Comparison, tmp_path: Path) -> None:
    assert not check_replaced(comparison, tmp_path / "new", overwrite=False)
    write_report(comparison, tmp_path, title="First")
    assert check_replaced(comparison, tmp_path, overwrite=False)
    others = dataclasses.replace(comparison, arms=comparison.arms[:1])
    with pytest.raises(CraftError, match="compares other runs"):
        check_replaced(others, tmp_path, overwrite=False)
    assert check_replaced(others, tmp_path, overwrite=True)
