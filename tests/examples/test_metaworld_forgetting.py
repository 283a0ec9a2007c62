"""The Meta-World example runs as its README says."""

import importlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples/metaworld_forgetting"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a script of the example, which reports in README.md."""
    monkeypatch.syspath_prepend(FOLDER)
    options = ["--quick", "--work", str(tmp_path / "work"), "--readme", str(tmp_path / "README.md")]

    def run_script(name: str, *more: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *options, *more])
        with pytest.raises(SystemExit) as finished:
            runpy.run_path(str(FOLDER / name), run_name="__main__")
        assert finished.value.code == 0

    return run_script


@pytest.mark.slow
def test_quick_goes_from_data_to_report(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("Before.\n\n<!-- pick-act -->\nold\n<!-- end of pick-act -->\n\nAfter.\n")
    run("run.py")
    text = readme.read_text()
    assert text.startswith("Before.\n\n<!-- pick-act -->\n### pick-place-v3 → door-open-v3")
    assert "<!-- end of pick-act -->\n\nAfter.\n" in text
    assert "| hidden + action | 1 |" in text
    half = next(line for line in text.splitlines() if line.startswith("| half of the scenes: act"))
    assert half.count("[") == 3  # with and without anchors, and new
    everything = json.loads((tmp_path / "results.json").read_text())
    assert everything.keys() == {"pick-act", "pick-act-coverage"}
    results = everything["pick-act"]
    arms = {arm["arm"]: arm for arm in results["arms"]}
    assert arms["hidden + action"]["action_error"]["mean"] > 0
    assert any(name.startswith("weight merge, α") for name in arms)
    assert results["teacher"]["old"]["mean"] == 0
    assert (tmp_path / "pick-act.png").stat().st_size > 10_000
    assert (tmp_path / "work/reports/pick-act/index.html").is_file()

    capsys.readouterr()
    run("run.py")
    assert "/" not in capsys.readouterr().err  # no job is done again
    assert readme.read_text() == text


@pytest.mark.slow
def test_another_family_goes_the_same_way(run: Callable[..., None], tmp_path: Path) -> None:
    run("run.py", "--families", "diffusion", "--groups", "main,rest")
    (results,) = json.loads((tmp_path / "results.json").read_text()).values()
    arms = {arm["arm"]: arm for arm in results["arms"]}
    assert {"plain fine-tuning", "hidden (perception side)", "LoRA"} < arms.keys()
    assert all(arm["action_error"]["mean"] > 0 for arm in arms.values())
    assert "### pick-place-v3 → door-open-v3 (diffusion)" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_a_row_of_tasks_goes_from_data_to_matrix(
    run: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run("sequence.py")
    matrices = json.loads((tmp_path / "results.json").read_text())["sequence-act"]
    assert [matrix["arm"] for matrix in matrices] == [
        "plain fine-tuning",
        "hidden + action",
        "replay",
    ]
    assert [len(row) for row in matrices[0]["rows"]] == [1, 2, 3, 4, 5]
    assert "| hidden + action | 1 |" in (tmp_path / "README.md").read_text()
    commands = capfd.readouterr().err
    assert commands.count("$ craft cache merge") == 3
    run("sequence.py")
    assert "$ craft" not in capfd.readouterr().err  # nothing is done again


def test_what_is_made_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    matrices = importlib.import_module("matrices")
    rows = ((1.0,), (0.5, 0.9), (0.25, 0.6, 0.8))
    matrix = matrices.Matrix(arm="a", seed=0, rows=rows)
    assert matrix.average == pytest.approx((0.25 + 0.6 + 0.8) / 3)
    assert matrix.forward == pytest.approx((1.0 + 0.9 + 0.8) / 3)
    # The first task lost 0.5 and 0.75 since it was learned, the second 0.3.
    assert matrix.forgotten == pytest.approx((0.625 + 0.3) / 2)
