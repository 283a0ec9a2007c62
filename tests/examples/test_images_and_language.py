"""The example of images and language runs as its README says."""

import importlib
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples/images_and_language"


@pytest.mark.slow
def test_quick_goes_from_teacher_to_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    results = tmp_path / "results.json"
    arms = ["plain fine-tuning", "hidden + action, 6 frames and variations", "replay, 6 frames"]
    arms += ["no old data: old instructions on new images"]
    options = ["--quick", "--work", str(tmp_path / "work"), "--results", str(results)]
    options += ["--seeds", "1", "--only", ";".join(arms)]

    def run() -> str:
        monkeypatch.setattr(sys, "argv", ["run.py", *options])
        with pytest.raises(SystemExit) as finished:
            runpy.run_path(str(FOLDER / "run.py"), run_name="__main__")
        assert finished.value.code == 0
        return capfd.readouterr().err

    # The teacher and plain fine-tuning learn a third task afterwards.
    assert run().count("$ craft train") == len(arms) + 2
    found = json.loads(results.read_text())
    assert list(found) == ["teacher", *arms]
    for runs in found.values():
        (measured,) = runs.values()
        assert list(measured["heard"]) == ["red", "green", "yellow", "blue"]
        assert list(measured["probe"]) == ["red", "green", "yellow", "blue", "purple"]
    later = json.loads((tmp_path / "later.json").read_text())
    assert list(later) == ["teacher", arms[0]]
    assert list(later["teacher"]["1"]["successes"]) == ["1", "2"]
    recoloured = json.loads((tmp_path / "recoloured.json").read_text())
    assert list(recoloured) == ["teacher", arms[0]]
    for (measured,) in (runs.values() for runs in recoloured.values()):
        assert list(measured["successes"]) == ["0", "0.3", "0.5", "0.7"]
        # Nothing is faded, and the episodes are the same.
        assert measured["successes"]["0"].keys() == {"red", "green", "yellow", "blue"}
    assert recoloured[arms[0]]["1"]["successes"]["0"] == found[arms[0]]["1"]["heard"]
    tables = (tmp_path / "tables.md").read_text()
    assert tables.count("| plain fine-tuning | 1 |") == 3
    assert "| after 1 steps | after 2 steps |" in tables
    assert "$ craft" not in run()  # nothing is done again
    assert json.loads(results.read_text()) == found


def test_the_expert_touches_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    table = importlib.import_module("table")
    for seed in range(20):
        scene = table.sample_scene(np.random.default_rng(seed))
        for colour in table.COLOURS:
            world = table.TableSimulation(colour, table.WORDINGS)
            result, own = world.reset(seed), scene
            assert not result.success
            while not result.over:
                action = table.expert_action(own, colour)
                own, result = own.moved(action), world.step(action)
            assert result.success
            assert own.touches(colour)


def test_faded_blocks_keep_their_hue_and_the_hand_its_white(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    table = importlib.import_module("table")
    scene = table.sample_scene(np.random.default_rng(0))
    seen = {
        tuple(pixel)
        for faded in (0.0, 0.5)
        for pixel in table.render(scene, faded=faded).reshape(-1, 3).tolist()
    }
    assert {(255, 0, 0), (192, 64, 64), (255, 255, 255), (128, 128, 128)} <= seen


def test_a_probe_reads_what_is_there_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(FOLDER.parents[1] / "tests/helpers")
    measures = importlib.import_module("measures")
    rng = np.random.default_rng(0)
    places = rng.uniform(size=(300, 5, 2))
    mixed = places[:, :2].reshape(300, 4) @ rng.normal(size=(4, 30))
    states = mixed + 0.01 * rng.normal(size=(300, 30))
    found = measures.explained(states, places)
    assert found["red"] > 0.99
    assert found["green"] > 0.99
    assert found["yellow"] < 0.1
