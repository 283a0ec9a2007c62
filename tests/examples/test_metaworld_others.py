"""Another family and the row of tasks in the Meta-World example run as its README says.

Apart from the rest, so that two processes of tests can share the time.
"""

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples/metaworld_forgetting"


@pytest.mark.slow
def test_another_family_goes_the_same_way(
    run_metaworld: Callable[..., None], tmp_path: Path
) -> None:
    run_metaworld("run.py", "--families", "diffusion", "--groups", "main,rest")
    (results,) = json.loads((tmp_path / "results.json").read_text()).values()
    arms = {arm["arm"]: arm for arm in results["arms"]}
    assert {"plain fine-tuning", "hidden (perception side)", "LoRA"} < arms.keys()
    assert all(arm["action_error"]["mean"] > 0 for arm in arms.values())
    assert "### pick-place-v3 → door-open-v3 (diffusion)" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_a_row_of_tasks_goes_from_data_to_matrix(
    run_metaworld: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_metaworld("sequence.py")
    matrices = json.loads((tmp_path / "results.json").read_text())["sequence-act"]
    assert [matrix["arm"] for matrix in matrices] == [
        "plain fine-tuning",
        "hidden + action",
        "hidden + action, 16 frames a task",
        "replay",
    ]
    assert [len(row) for row in matrices[0]["rows"]] == [1, 2, 3, 4, 5]
    assert "| hidden + action | 1 |" in (tmp_path / "README.md").read_text()
    commands = capfd.readouterr().err
    assert commands.count("$ craft cache merge") == 6
    run_metaworld("sequence.py", "--arms", "replay")
    assert "$ craft" not in capfd.readouterr().err  # nothing is done again
    again = json.loads((tmp_path / "results.json").read_text())["sequence-act"]
    assert again == matrices  # the other arms are kept


def test_what_is_made_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    matrices = importlib.import_module("matrices")
    rows = ((1.0,), (0.5, 0.9), (0.25, 0.6, 0.8))
    matrix = matrices.Matrix(arm="a", seed=0, rows=rows)
    assert matrix.average == pytest.approx((0.25 + 0.6 + 0.8) / 3)
    assert matrix.forward == pytest.approx((1.0 + 0.9 + 0.8) / 3)
    # The first task lost 0.5 and 0.75 since it was learned, the second 0.3.
    assert matrix.forgotten == pytest.approx((0.625 + 0.3) / 2)
