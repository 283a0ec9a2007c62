"""Another family and the row of tasks in the Meta-World example run as its README says.

Apart from the rest, so that two processes of tests can share the time.
"""

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from craftcli.cache.reading.reader import CacheReader

FOLDER = Path(__file__).parents[2] / "examples/metaworld_forgetting"


@pytest.mark.slow
def test_another_family_goes_the_same_way(
    run_metaworld: Callable[..., None], tmp_path: Path
) -> None:
    names = "plain fine-tuning;hidden + action;hidden (perception side);LoRA"
    run_metaworld("run.py", "--families", "diffusion", "--groups", "main,rest", "--arms", names)
    (results,) = json.loads((tmp_path / "results.json").read_text()).values()
    arms = {arm["arm"]: arm for arm in results["arms"]}
    assert {"plain fine-tuning", "hidden (perception side)", "LoRA"} < arms.keys()
    assert all(arm["action_error"]["mean"] > 0 for arm in arms.values())
    assert "### pick-place-v3 → door-open-v3 (diffusion)" in (tmp_path / "tables.md").read_text()


@pytest.mark.slow
def test_a_row_of_tasks_goes_from_data_to_matrix(
    run_metaworld: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arms = ["plain fine-tuning", "hidden + action, 16 frames a task", "replay"]
    run_metaworld("sequence.py", "--arms", ";".join(arms))
    matrices = json.loads((tmp_path / "results.json").read_text())["sequence-act"]
    assert [matrix["arm"] for matrix in matrices] == arms
    assert [len(row) for row in matrices[0]["rows"]] == [1, 2, 3, 4, 5]
    assert "| replay | 1 |" in (tmp_path / "tables.md").read_text()
    commands = capfd.readouterr().err
    # Of the few frames of each task; replay draws its frames anew.
    assert commands.count("$ craft cache merge") == commands.count("--several-teachers") == 3
    assert commands.count("--other-student") == 3
    run_metaworld("sequence.py", "--arms", "replay")
    assert "$ craft" not in capfd.readouterr().err  # nothing is done again
    again = json.loads((tmp_path / "results.json").read_text())["sequence-act"]
    assert again == matrices  # the other arms are kept


@pytest.mark.slow
def test_continual_world_goes_from_data_to_matrices(
    run_metaworld: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arms = ["plain fine-tuning", "hidden + action, 16 frames a task"]
    arms += ["hidden + action, no old frames, slower", "EWC, λ 1", "joint training"]
    run_metaworld("continual_world.py", "--seeds", "1", "--arms", ";".join(arms))
    results = json.loads((tmp_path / "results.json").read_text())["continual-world-act"]
    assert results["tasks"] == ["hammer-v3", "push-wall-v3", "faucet-close-v3"]
    assert min(results["expert"].values()) > 0.5
    assert [matrix["arm"] for matrix in results["matrices"]] == arms
    assert [len(row) for row in results["matrices"][0]["rows"]] == [1, 2, 3]
    assert [len(row) for row in results["matrices"][-1]["rows"]] == [3]
    text = (tmp_path / "tables.md").read_text()
    assert "| average | just learned | forgetting | forward transfer | NBT |" in text
    assert (tmp_path / "continual-world-act.png").stat().st_size > 10_000
    # The task's number is one-hot in every anchor, whether it was recorded, varied or drawn.
    folder = tmp_path / "work/continual-world-act"
    caches = ("anchors/all.zarr", "anchors/all.zarr", "2-anchors.zarr")
    for arm, name in zip(arms[1:4], caches, strict=True):
        cache = folder / arm.replace(" ", "-") / "seed-1" / name
        numbers = CacheReader.open(cache).read_all("inputs/observation.environment_state")
        assert len(np.unique(numbers, axis=0)) == 2
    capfd.readouterr()
    run_metaworld("continual_world.py", "--seeds", "1", "--arms", arms[0])
    assert "$ craft" not in capfd.readouterr().err  # nothing is done again
    again = json.loads((tmp_path / "results.json").read_text())["continual-world-act"]
    assert again == results  # the other arms are kept


def test_a_task_has_its_number_beside_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    views = importlib.import_module("views")
    view = views.View(numbered=("push-wall-v3", "push-v3"))
    assert view.vectors == {"observation.state": 39, "observation.environment_state": 2}
    world = view.worlds("push-v3")()
    for seen in (world.reset(0).observation, world.step(np.zeros(4)).observation):
        assert seen["observation.environment_state"].tolist() == [0, 1]
        assert seen["observation.state"].shape == (39,)
    world.close()


def test_what_is_made_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    matrices = importlib.import_module("matrices")
    rows = ((1.0,), (0.5, 0.9), (0.25, 0.6, 0.8))
    matrix = matrices.Matrix(arm="a", seed=0, rows=rows)
    assert matrix.average == pytest.approx((0.25 + 0.6 + 0.8) / 3)
    assert matrix.forward == pytest.approx((1.0 + 0.9 + 0.8) / 3)
    # The first task lost 0.5 and 0.75 since it was learned, the second 0.3.
    assert matrix.forgotten == pytest.approx((0.625 + 0.3) / 2)
    # Continual World counts the last task, of which nothing can be lost yet.
    assert matrix.forgetting == pytest.approx((0.75 + 0.3 + 0.0) / 3)
    assert matrix.transfer([0.9, 0.9, 0.9]) == pytest.approx(0.0)
    joint = matrices.Matrix(arm="joint", seed=0, rows=((0.5, 0.6, 0.7),))
    assert (joint.forgetting, joint.forgotten) == (None, None)
    assert joint.average == joint.forward == pytest.approx(0.6)
    (again,) = matrices.earlier_matrices([matrix.to_json(), joint.to_json()], [joint])
    assert again == matrix
    table = matrices.matrices_table(["a", "b", "c"], [matrix, joint], [0.9, 0.9, 0.9])
    assert table.splitlines()[-1].endswith("| 0.60 | 0.60 | – | -0.30 | – |")
