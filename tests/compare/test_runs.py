"""Which of several evaluations counts, and which runs are seeds of one arm."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from craftcli.compare.arms import group_arms
from craftcli.compare.runs import read_measured
from craftcli.evaluation.results import (
    Drift,
    Episode,
    Evaluation,
    LayerDrift,
    PolicyIdentity,
    Success,
)

LAYER = LayerDrift(layer="vlm.3", nmse=0.25, cka=0.5)
DRIFT = Drift(
    cache="a.zarr",
    cache_digest="a",
    teacher_digest="t",
    dataset_fingerprint="d",
    rows=8,
    shared_rows=0,
    loss="nmse",
    l_ret={"hidden": 0.25},
    layers=(LAYER,),
    action=None,
)


def success(environment: str, *outcomes: bool) -> Success:
    episodes = tuple(Episode(seed=i, success=ok, steps=1) for i, ok in enumerate(outcomes))
    return Success(environment=environment, group=None, max_steps=1, episodes=episodes)


def evaluation(*found: Success, when: str | None, **changed: Any) -> Evaluation:
    weights = changed.pop("weights", "w")
    policy = PolicyIdentity(source="run", policy_type="act", weights_digest=weights, step=4)
    return Evaluation(policy=policy, success=found, when=when, **changed)


def test_more_episodes_win_and_the_later_of_as_many(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations"
    large = evaluation(
        success("a", True, True), success("b", False), when="2026-01-01", drift=DRIFT
    )
    files = [
        large.keep(folder, "evaluation"),
        evaluation(success("a", False), success("b", True), when="2026-01-02").keep(folder, "e"),
    ]
    # Copying a folder may turn the times of its files around.
    for age, file in enumerate(files):
        os.utime(file, (1e9 - age, 1e9 - age))
    measured = read_measured(tmp_path)
    assert measured is not None
    assert {name: found.rate for name, found in measured.successes.items()} == {"a": 1.0, "b": 1.0}
    assert measured.drift is not None
    assert measured.drift.value == 0.25


def test_evaluations_of_other_weights_are_not_mixed(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations"
    evaluation(success("a", True, True), when="2026-01-01", drift=DRIFT).keep(folder, "e")
    evaluation(success("b", True), when="2026-01-02", weights="other").keep(folder, "e")
    measured = read_measured(tmp_path)
    assert measured is not None
    assert (list(measured.successes), measured.drift) == (["b"], None)


def test_no_evaluation_replaces_another(tmp_path: Path) -> None:
    first = evaluation(success("a", True), when="2026-01-01")
    (tmp_path / "e-2.json").write_text("damaged")
    names = [
        found.keep(tmp_path, "e").name
        for found in (
            first,
            evaluation(success("a", False), when="2026-01-01"),
            evaluation(success("a", True), when="2026-01-02"),  # the very same result
        )
    ]
    assert names == ["e.json", "e-3.json", "e.json"]
    assert Evaluation.load(tmp_path / "e.json").when == "2026-01-01"
    assert (tmp_path / "e-2.json").read_text() == "damaged"


@pytest.mark.parametrize(("teacher", "arms"), [("teacher", 1), ("other", 2)])
def test_the_folder_of_a_policy_makes_no_arm_but_its_weights_do(
    run_of: Callable[..., Any], teacher: str, arms: int
) -> None:
    here = run_of("hidden", old=1.0, new=1.0, seed=0)
    here = replace(here, settings={**here.settings, "policy": "outputs/policy"})
    there = run_of("hidden", old=1.0, new=1.0, seed=1)
    there = replace(
        there,
        settings={**there.settings, "policy": "/home/me/outputs/policy"},
        summary=replace(there.summary, teacher=teacher),
    )
    assert len(group_arms([here, there])) == arms
