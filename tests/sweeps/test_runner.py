"""A real sweep on the demo: done once, kept, resumed, and done again after a change."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from craftcli.compare.compare import Comparison, compare_runs
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.datasets import NEW, ensure_dataset
from craftcli.engine.summary_file import RunSummary
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.sweeps.progress import Job
from craftcli.sweeps.runner import SweepResult, run_sweep
from craftcli.sweeps.sweep_file import SweepSpec

SWEEP: dict[str, Any] = {
    "cache": {"samples": 16},
    "train": {"steps": 3, "batch_size": 4, "anchor_batch_size": 4, "device": "cpu"},
    "eval": {"episodes": 2, "env": ["demo:red", "demo:blue"]},
    "arm": [
        {"name": "half", "merge": {"of": "none", "alpha": 0.5}},
        {"name": "none", "train": {"mode": "none"}},
        {"name": "hidden", "train": {"mode": "hidden"}},
    ],
}


def sweep(folder: Path, **changed: Any) -> tuple[SweepResult, list[str]]:
    started: list[Job] = []
    spec = SweepSpec.from_dict({**SWEEP, **changed}, folder=folder)
    result = run_sweep(spec, on_job=started.append)
    return result, [job.what for job in started]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepResult, list[str]]:
    """A sweep that has run; a test that changes it puts it back."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, *sweep(folder)


def test_everything_is_done_once_in_order(finished: tuple[Path, SweepResult, list[str]]) -> None:
    folder, result, started = finished
    assert not result.failures
    assert (result.done, result.kept, result.interrupted) == (8, 0, False)
    assert started[0].startswith("cache ")
    assert started[1:] == [
        "evaluate teacher",
        "train none, seed 0",
        "evaluate none, seed 0",
        "train hidden, seed 0",
        "evaluate hidden, seed 0",
        "merge half, seed 0",
        "evaluate half, seed 0",
    ]
    again, started_again = sweep(folder)
    assert (again.done, again.kept, started_again) == (0, 8, [])


def test_a_sweep_is_compared_as_a_whole(finished: tuple[Path, SweepResult, list[str]]) -> None:
    comparison: Comparison = compare_runs([finished[1].folder])
    assert comparison.notes == ()
    assert [row.arm.label for row in comparison.arms] == ["half", "none", "hidden"]
    assert comparison.teacher is not None
    half, none, hidden = comparison.arms
    for row in comparison.arms:
        assert all(row.estimates[name] for name in ("old", "new", "nbt", "drift", "action_error"))
    assert half.estimates["seconds"] is None
    for row in (none, hidden):
        assert all(row.estimates[n] for n in ("seconds", "peak_memory_bytes"))
    assert none.estimates["anchors"] is None
    assert hidden.estimates["anchors"] is not None
    assert hidden.estimates["anchors"].mean == 16


def test_the_same_seeds_give_the_same_table(
    finished: tuple[Path, SweepResult, list[str]], tmp_path: Path
) -> None:
    again, _ = sweep(tmp_path)

    def table(folder: Path) -> list[Any]:
        names = ("old", "new", "nbt", "drift", "action_error")
        comparison = compare_runs([folder])
        return [(row.arm.label, *(row.estimates[n] for n in names)) for row in comparison.rows]

    assert table(again.folder) == table(finished[1].folder)
    moved = {label: drift for label, _, _, _, drift, _ in table(again.folder)}
    assert moved["hidden"] is not None
    assert moved["hidden"].mean > 0


def test_changed_settings_of_one_arm_run_that_arm_again(
    finished: tuple[Path, SweepResult, list[str]],
) -> None:
    folder = finished[0]
    arms = [*SWEEP["arm"][:2], {"name": "hidden", "train": {"mode": "hidden", "lambda_init": 2.0}}]
    result, started = sweep(folder, arm=arms)
    assert started == ["train hidden, seed 0", "evaluate hidden, seed 0"]
    run = result.folder / "runs/hidden/seed-0"
    assert json.loads((run / "craft_config.json").read_text())["lambda_init"] == 2.0
    back, started = sweep(folder)
    assert started == ["train hidden, seed 0", "evaluate hidden, seed 0"]
    assert back.kept == 6


def test_what_another_teacher_left_is_not_kept(
    finished: tuple[Path, SweepResult, list[str]], tmp_path: Path
) -> None:
    """The same path with other weights: everything is done again."""
    policy = tmp_path / "policy"
    shutil.copytree(TEACHER_FOLDER, policy)
    data = str(ensure_dataset(NEW))
    train = {**SWEEP["train"], "policy": str(policy), "dataset": NEW.repo_id, "dataset_root": data}
    arms = [SWEEP["arm"][1]]
    _, started = sweep(tmp_path, train=train, arm=arms)
    assert len(started) == 3
    run = finished[1].folder / "runs/none/seed-0/checkpoints/last/pretrained_model"
    shutil.copy(run / "model.safetensors", policy / "model.safetensors")
    result, again = sweep(tmp_path, train=train, arm=arms)
    assert (again, result.kept) == (started, 0)


def test_an_interrupted_run_goes_on_to_the_same_end(
    finished: tuple[Path, SweepResult, list[str]], tmp_path: Path
) -> None:
    """Ctrl-C in the middle of training: the sweep ends, and the next one resumes that run."""
    spec = SweepSpec.from_dict({**SWEEP, "arm": [SWEEP["arm"][1]]}, folder=tmp_path)

    @contextmanager
    def interrupting(total: int, unit: str, name: str) -> Iterator[Callable[[int], None]]:
        def advance(count: int) -> None:
            if unit == "steps":
                os.kill(os.getpid(), signal.SIGINT)

        yield advance

    stopped = run_sweep(spec, bar=interrupting)
    run = stopped.folder / "runs/none/seed-0"
    assert stopped.interrupted
    left = RunSummary.read(run)
    assert left is not None
    assert (left.steps_done, left.complete) == (1, False)
    result, started = sweep(tmp_path, arm=[SWEEP["arm"][1]])
    assert not result.interrupted
    assert started == ["train none, seed 0", "evaluate none, seed 0"]
    ended = RunSummary.read(run)
    assert ended is not None
    assert ended.complete
    assert ended.seconds > left.seconds
    weights = "runs/none/seed-0/checkpoints/last/pretrained_model/model.safetensors"
    undisturbed = finished[1].folder / weights
    assert (result.folder / weights).read_bytes() == undisturbed.read_bytes()


def test_the_bar_of_a_cache_counts_its_variations(tmp_path: Path) -> None:
    arms = [{"name": "varied", "cache": {"samples": 4, "augment": 3}}]
    spec = SweepSpec.from_dict({**SWEEP, "arm": arms}, folder=tmp_path)
    counted: dict[str, list[int]] = {}

    @contextmanager
    def counting(total: int, unit: str, name: str) -> Iterator[Callable[[int], None]]:
        so_far = counted.setdefault(name, [total, 0])

        def advance(count: int) -> None:
            so_far[1] += count

        yield advance

    assert not run_sweep(spec, bar=counting).failures
    assert counted["Teacher"] == [16, 16]


@pytest.mark.parametrize(
    ("cache", "anchors"), [({"samples": 16}, 2), ({"samples": 8, "augment": 1}, 4)]
)
def test_runs_with_the_default_number_of_anchors_are_found_again(
    tmp_path: Path, cache: dict[str, int], anchors: int
) -> None:
    """Variations have more anchors a step, so that the number follows from the cache."""
    wanted: dict[str, Any] = {
        "cache": cache,
        "train": {"steps": 2, "batch_size": 16, "device": "cpu"},
        "arm": [{"name": "hidden", "train": {"mode": "hidden"}}],
        "eval": {"episodes": 1, "env": ["demo:red", "demo:blue"]},
    }
    sweep(tmp_path, **wanted)
    (run,) = (
        file.parent
        for file in tmp_path.rglob("craft_config.json")
        if "checkpoints" not in file.parts
    )
    assert json.loads((run / "craft_config.json").read_text())["anchor_batch_size"] == anchors
    assert not [what for what in sweep(tmp_path, **wanted)[1] if what.startswith("train")]
    (run / "checkpoints/last/pretrained_model/config.json").write_text("{broken")
    (error,) = sweep(tmp_path, **wanted)[0].failures.values()
    assert "config.json" in str(error)


def test_an_arm_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    arms = [
        {"name": "broken", "train": {"mode": "none", "device": "nowhere"}},
        {"name": "half", "merge": {"of": "broken", "alpha": 0.5}},
        SWEEP["arm"][1],
    ]
    reported: dict[str, CraftError] = {}
    spec = SweepSpec.from_dict({**SWEEP, "arm": arms}, folder=tmp_path)
    order: list[str] = []

    def note(what: str, error: CraftError) -> None:
        reported[what] = error
        order.append(f"{what} failed")

    result = run_sweep(spec, on_job=lambda job: order.append(job.what), on_failure=note)
    assert list(result.failures) == ["train broken, seed 0"]
    assert reported == result.failures
    # At once, not when the other arms are done.
    assert order.index("train broken, seed 0 failed") == order.index("train broken, seed 0") + 1
    assert "nowhere" in str(result.failures["train broken, seed 0"])
    assert result.skipped == (
        "evaluate broken, seed 0",
        "merge half, seed 0",
        "evaluate half, seed 0",
    )
    assert [row.arm.label for row in compare_runs([result.folder]).arms] == ["none"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "failed", "kept"),
    [
        ("runs/none/seed-0/craft_config.json", "train none, seed 0", 4),
        ("runs/half/seed-0/craft_merge.json", "merge half, seed 0", 6),
    ],
)
def test_a_damaged_file_does_not_stop_the_others(
    finished: tuple[Path, SweepResult, list[str]], file: str, failed: str, kept: int
) -> None:
    damaged = finished[1].folder / file
    whole = damaged.read_bytes()
    damaged.write_bytes(b"{garbage")
    reported: dict[str, CraftError] = {}
    started: list[str] = []
    spec = SweepSpec.from_dict(SWEEP, folder=finished[0])
    try:
        result = run_sweep(
            spec, on_job=lambda job: started.append(job.what), on_failure=reported.__setitem__
        )
        damage = compare_runs([result.folder]).damage
    finally:
        damaged.write_bytes(whole)
    assert [*result.failures] == [failed]
    assert reported == result.failures
    assert result.failures[failed].exit_code == EXIT_CHECK_FAILED
    assert str(damaged) in result.failures[failed].what
    assert (started, result.kept) == ([], kept)
    assert [str(damaged) in error.what for error in damage] == [True]


def test_a_damaged_result_is_reported_when_it_is_found(
    finished: tuple[Path, SweepResult, list[str]],
) -> None:
    """Before the jobs that come after it, which may take hours."""
    damaged = finished[1].folder / "runs/none/seed-0/craft_config.json"
    whole = damaged.read_bytes()
    damaged.write_bytes(b"{garbage")
    more = {"name": "more", "train": {"mode": "none", "lr": 1e-5, "steps": 1}}
    order: list[str] = []
    try:
        run_sweep(
            SweepSpec.from_dict({**SWEEP, "arm": [*SWEEP["arm"], more]}, folder=finished[0]),
            on_job=lambda job: order.append(job.what),
            on_failure=lambda what, error: order.append(f"{what} failed: {error.what}"),
        )
    finally:
        damaged.write_bytes(whole)
    assert order[0].startswith("train none, seed 0 failed: ")
    assert str(damaged) in order[0]
    assert order[1:] == ["train more, seed 0", "evaluate more, seed 0"]
    back, _ = sweep(finished[0])
    assert back.kept == 8


def test_seeds_share_the_anchors_that_the_first_one_made(tmp_path: Path) -> None:
    arm = {"name": "own", "train": {"anchor_samples": 16}}
    result, _ = sweep(tmp_path, arm=[arm], seeds=[0, 1])
    assert not result.failures
    assert len(list((tmp_path).rglob("anchors-*.zarr"))) == 1
    again, started = sweep(tmp_path, arm=[arm], seeds=[0, 1])
    assert (again.done, started) == (0, [])
