"""Comparison of runs: arms, their results, and what cannot be compared."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from craftcli.compare.compare import ArmResult, compare_records
from craftcli.compare.runs import Quantity, Roles, RunRecord
from craftcli.compare.table import duration, used_columns

type Make = Callable[..., Any]


def mean_of(row: ArmResult, name: str) -> float:
    estimate = row.estimates[name]
    assert estimate is not None
    return estimate.mean


def test_seeds_of_the_same_settings_become_one_arm(run_of: Make, teacher_of: Make) -> None:
    runs = [
        run_of(mode, old=old, new=1.0, seed=seed)
        for mode, old in (("none", 0.0), ("hidden", 1.0))
        for seed in range(3)
    ]
    comparison = compare_records([teacher_of(), *runs], Roles())
    assert [(row.arm.label, row.arm.seeds) for row in comparison.arms] == [
        ("none", 3),
        ("hidden", 3),
    ]
    none, hidden = comparison.arms
    each = hidden.to_json()["by_environment"]
    assert {name: found["mean"] for name, found in each.items()} == {
        "demo:red": mean_of(hidden, "old"),
        "demo:green": mean_of(hidden, "old"),
        "demo:blue": mean_of(hidden, "new"),
    }
    assert mean_of(none, "nbt") == pytest.approx(1.0)
    assert mean_of(hidden, "nbt") == pytest.approx(0.0)
    assert mean_of(hidden, "old") == 1.0
    assert comparison.teacher is not None
    assert mean_of(comparison.teacher, "new") == 0.0
    assert comparison.plain is none
    assert comparison.notes == ()


def test_the_teacher_that_was_measured_with_the_runs_is_enough(
    run_of: Make, teacher_of: Make
) -> None:
    success = teacher_of().measured.successes
    runs = [run_of("hidden", old=0.5, new=1.0, seed=seed) for seed in range(2)]
    measured = replace(runs[0].measured, of_teacher=success)
    comparison = compare_records([replace(runs[0], measured=measured), runs[1]], Roles())
    (hidden,) = comparison.arms
    assert comparison.teacher is not None
    assert mean_of(comparison.teacher, "old") == 1.0
    assert mean_of(hidden, "nbt") == pytest.approx(0.5)
    assert comparison.notes == ()
    # Other episodes than those of the runs are no comparison.
    other = {name: replace(one, episodes=one.episodes[1:]) for name, one in success.items()}
    alone = [replace(runs[0], measured=replace(measured, of_teacher=other)), runs[1]]
    assert compare_records(alone, Roles()).teacher is None


def test_arms_are_named_by_what_sets_them_apart(run_of: Make, summary_of: Make) -> None:
    records = [
        run_of("hidden", old=1, new=1),
        run_of("hidden", old=1, new=1, settings={"retention_every": 5}),
        run_of("hidden", old=1, new=1, summary=summary_of(anchors=64)),
        run_of("none", old=0, new=1),
    ]
    labels = [row.arm.label for row in compare_records(records, Roles()).arms]
    assert labels == [
        "hidden, retention every 1, anchors 512",
        "hidden, retention every 5, anchors 512",
        "hidden, retention every 1, anchors 64",
        "none, retention every 1",
    ]


def test_where_a_run_was_and_how_it_was_saved_is_no_difference(run_of: Make) -> None:
    first = run_of("hidden", old=1, new=1, settings={"device": "cpu", "cache": "a.zarr"})
    second = run_of("hidden", old=1, new=1, seed=1, settings={"device": "cuda", "cache": "b.zarr"})
    (arm,) = compare_records([first, second], Roles()).arms
    assert arm.arm.seeds == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"teacher": "another"}, "another teacher"),
        ({"dataset_fingerprint": "x"}, "another dataset"),
    ],
)
def test_another_teacher_or_dataset_leaves_only_the_costs(
    run_of: Make, summary_of: Make, changed: dict[str, str], message: str
) -> None:
    runs = [run_of("hidden", old=1, new=1, seed=seed) for seed in range(2)]
    other = run_of("none", old=1, new=1, summary=summary_of(**changed))
    comparison = compare_records([*runs, other], Roles())
    estimates = comparison.arms[1].estimates
    assert estimates["old"] is None
    assert estimates["drift"] is None
    assert estimates["seconds"] is not None
    assert any(str(other.folder) in note and message in note for note in comparison.notes)


def test_other_episodes_are_left_out(run_of: Make, measured_of: Make) -> None:
    runs = [run_of("hidden", old=1, new=1, seed=seed) for seed in range(2)]
    other = run_of("none", old=0, new=1, measured=measured_of(0.0, 1.0, episodes=20))
    comparison = compare_records([*runs, other], Roles())
    assert comparison.arms[1].estimates["old"] is None
    assert any("other episodes" in note for note in comparison.notes)


def test_drift_on_other_anchors_is_left_out(run_of: Make, measured_of: Make) -> None:
    runs = [run_of("hidden", old=1, new=1, seed=seed) for seed in range(2)]
    found = measured_of(0.0, 1.0, drift=Quantity(value=1.0, basis="others"))
    comparison = compare_records([*runs, run_of("none", old=0, new=1, measured=found)], Roles())
    assert comparison.arms[1].estimates["drift"] is None
    assert comparison.arms[1].estimates["old"] is not None
    assert any("the drift was measured on other anchors" in note for note in comparison.notes)


def test_what_is_missing_is_named_with_the_command(run_of: Make, summary_of: Make) -> None:
    records: list[RunRecord] = [
        run_of("a", old=1, new=1, measured=None),
        run_of("b", old=1, new=1, measured=None, saved=False),
        run_of("c", old=1, new=1, summary=summary_of(steps_done=10)),
    ]
    notes = "\n".join(compare_records(records, Roles()).notes)
    assert "runs/a-0 was not evaluated: craft eval runs/a-0" in notes
    assert "runs/b-0 has no checkpoint" in notes
    assert "runs/b-0 was not evaluated" not in notes
    assert "craft train --resume runs/c-0" in notes


def test_roles_can_be_given_where_environments_have_none(run_of: Make, measured_of: Make) -> None:
    found = measured_of(1.0, 0.5)
    found = replace(
        found, successes={n: replace(s, group=None) for n, s in found.successes.items()}
    )
    record = run_of("hidden", old=1, new=1, measured=found)
    unknown = compare_records([record], Roles())
    assert unknown.arms[0].estimates["old"] is None
    assert any("--old or --new" in note for note in unknown.notes)
    roles = Roles(old=("demo:red", "demo:green"), new=("demo:blue",))
    known = compare_records([record], roles)
    assert mean_of(known.arms[0], "new") == 0.5


def test_another_policy_than_the_teacher_is_an_arm(
    run_of: Make, teacher_of: Make, measured_of: Make
) -> None:
    other = replace(teacher_of(), measured=measured_of(1.0, 0.0), folder=Path("somebody"))
    comparison = compare_records([other, run_of("hidden", old=1, new=1)], Roles())
    assert comparison.teacher is None
    assert [row.arm.label for row in comparison.arms] == ["somebody", "hidden"]


def test_columns_of_which_nothing_is_known_are_not_shown(run_of: Make) -> None:
    comparison = compare_records([run_of("none", old=0, new=1, measured=None)], Roles())
    assert [column.key for column in used_columns(comparison)] == [
        "seconds",
        "peak_memory_bytes",
        "trainable_parameters",
    ]


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3600)] == ["0 s", "1 min 0 s", "1 h 0 min"]
