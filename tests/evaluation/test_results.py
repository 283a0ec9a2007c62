"""Results of an evaluation: on disk, and the intervals of success rates."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from craftcli.errors import CraftError
from craftcli.evaluation.results import (
    ActionError,
    DatasetLoss,
    Drift,
    Episode,
    Evaluation,
    LayerDrift,
    PolicyIdentity,
    Success,
    wilson,
)

FOUND = Evaluation(
    policy=PolicyIdentity(source="runs/a", policy_type="act", weights_digest="ab", step=7),
    drift=Drift(
        cache="anchors.zarr",
        cache_digest="c",
        teacher_digest="t",
        dataset_fingerprint="d",
        rows=8,
        shared_rows=0,
        loss="nmse",
        l_ret={"hidden": 0.25},
        layers=(LayerDrift(layer="decoder.0", nmse=0.25, cka=0.5),),
        action=ActionError(kind="nmse", value=0.125, rows=8),
    ),
    losses=(
        DatasetLoss(
            dataset="me/old",
            fingerprint="f",
            group="old",
            frames=4,
            seed=0,
            mean=1.5,
            by_task={"push": 1.5},
        ),
    ),
    success=(
        Success(
            environment="demo:red",
            group="old",
            max_steps=6,
            episodes=(
                Episode(seed=1000, success=True, steps=6),
                Episode(seed=1001, success=False, steps=2, error="OSError: gone"),
            ),
        ),
    ),
    left_out=("nothing",),
)


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "evaluations/first.json"
    FOUND.save(file)
    FOUND.save(file)
    assert Evaluation.load(file) == FOUND
    assert [path.name for path in file.parent.iterdir()] == ["first.json"]


@pytest.mark.parametrize("content", ["", "{}", '{"format": 2}', "[1]", '{"format": 1}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(CraftError, match="not an evaluation that craft can read"):
        Evaluation.load(file)


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(CraftError, match="Cannot write"):
        FOUND.save(tmp_path / "taken/evaluation.json")


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_agrees_with_scipy_and_holds_the_rate(counts: tuple[int, int]) -> None:
    successes, trials = counts
    low, high = wilson(successes, trials)
    theirs = binomtest(successes, trials).proportion_ci(method="wilson")
    assert low == pytest.approx(theirs.low, abs=1e-9)
    assert high == pytest.approx(theirs.high, abs=1e-9)
    assert 0 <= low <= successes / trials <= high <= 1


def test_no_trials_is_no_rate() -> None:
    with pytest.raises(ValueError, match="0 of 0"):
        wilson(0, 0)
