"""A sweep on the demo, for real: done once, kept, gone on with, and done again when it changed."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.datasets import NEW, ensure_dataset
from craftcli.report.compare import Comparison, compare_runs
from craftcli.report.run_summary import RunSummary
from craftcli.sweeps.progress import Job
from craftcli.sweeps.running import SweepResult, run_sweep
from craftcli.sweeps.spec import SweepSpec

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
    told: list[Job] = []
    spec = SweepSpec.from_dict({**SWEEP, **changed}, folder=folder)
    result = run_sweep(spec, on_job=told.append)
    return result, [job.what for job in told]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepResult, list[str]]:
    """A sweep that has run; a test that changes it puts it back."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, *sweep(folder)


def test_everything_is_done_once_in_order(finished: tuple[Path, SweepResult, list[str]]) -> None:
    folder, result, told = finished
    assert not result.failures
    assert (result.done, result.kept, result.interrupted) == (8, 0, False)
    assert told[0].startswith("cache ")
    assert told[1:] == [
        "evaluate teacher",
        "train none, seed 0",
        "evaluate none, seed 0",
        "train hidden, seed 0",
        "evaluate hidden, seed 0",
        "merge half, seed 0",
        "evaluate half, seed 0",
    ]
    again, told_again = sweep(folder)
    assert (again.done, again.kept, told_again) == (0, 8, [])


def test_a_sweep_is_compared_as_a_whole(finished: tuple[Path, SweepResult, list[str]]) -> None:
    comparison: Comparison = compare_runs([finished[1].folder])
    assert comparison.notes == ()
    assert [row.arm.label for row in comparison.arms] == ["half", "none", "hidden"]
    assert comparison.teacher is not None
    half, none, hidden = comparison.arms
    for row in comparison.arms:
        assert all(row.figures[name] for name in ("old", "new", "nbt", "drift", "action_error"))
    assert half.figures["seconds"] is None
    for row in (none, hidden):
        assert all(row.figures[n] for n in ("seconds", "peak_memory_bytes"))
    assert none.figures["anchors"] is None
    assert hidden.figures["anchors"] is not None
    assert hidden.figures["anchors"].mean == 16


def test_the_same_seeds_give_the_same_table(
    finished: tuple[Path, SweepResult, list[str]], tmp_path: Path
) -> None:
    again, _ = sweep(tmp_path)

    def table(folder: Path) -> list[Any]:
        names = ("old", "new", "nbt", "drift", "action_error")
        comparison = compare_runs([folder])
        return [(row.arm.label, *(row.figures[n] for n in names)) for row in comparison.rows]

    assert table(again.folder) == table(finished[1].folder)
    moved = {label: drift for label, _, _, _, drift, _ in table(again.folder)}
    assert moved["hidden"] is not None
    assert moved["hidden"].mean > 0


def test_changed_settings_of_one_arm_run_that_arm_again(
    finished: tuple[Path, SweepResult, list[str]],
) -> None:
    folder = finished[0]
    arms = [*SWEEP["arm"][:2], {"name": "hidden", "train": {"mode": "hidden", "lambda_init": 2.0}}]
    result, told = sweep(folder, arm=arms)
    assert told == ["train hidden, seed 0", "evaluate hidden, seed 0"]
    run = result.folder / "runs/hidden/seed-0"
    assert json.loads((run / "craft_config.json").read_text())["lambda_init"] == 2.0
    back, told = sweep(folder)
    assert told == ["train hidden, seed 0", "evaluate hidden, seed 0"]
    assert back.kept == 6


def test_what_another_teacher_left_is_not_kept(
    finished: tuple[Path, SweepResult, list[str]], tmp_path: Path
) -> None:
    """The same path, with other weights in it: everything is done again."""
    policy = tmp_path / "policy"
    shutil.copytree(TEACHER_FOLDER, policy)
    data = str(ensure_dataset(NEW))
    train = {**SWEEP["train"], "policy": str(policy), "dataset": NEW.repo_id, "dataset_root": data}
    arms = [SWEEP["arm"][1]]
    _, told = sweep(tmp_path, train=train, arm=arms)
    assert len(told) == 3
    run = finished[1].folder / "runs/none/seed-0/checkpoints/last/pretrained_model"
    shutil.copy(run / "model.safetensors", policy / "model.safetensors")
    result, again = sweep(tmp_path, train=train, arm=arms)
    assert (again, result.kept) == (told, 0)


def test_an_interrupted_run_goes_on_to_the_same_end(
    finished: tuple[Path, SweepResult, list[str]], tmp_path: Path
) -> None:
    """Ctrl-C in the middle of training: the sweep ends, and the next one resumes that run."""
    spec = SweepSpec.from_dict({**SWEEP, "arm": [SWEEP["arm"][1]]}, folder=tmp_path)

    @contextmanager
    def interrupting(total: int, unit: str) -> Iterator[Callable[[int], None]]:
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
    result, told = sweep(tmp_path, arm=[SWEEP["arm"][1]])
    assert not result.interrupted
    assert told == ["train none, seed 0", "evaluate none, seed 0"]
    ended = RunSummary.read(run)
    assert ended is not None
    assert ended.complete
    assert ended.seconds > left.seconds
    weights = "runs/none/seed-0/checkpoints/last/pretrained_model/model.safetensors"
    undisturbed = finished[1].folder / weights
    assert (result.folder / weights).read_bytes() == undisturbed.read_bytes()


def test_an_arm_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    arms = [
        {"name": "broken", "train": {"mode": "none", "device": "nowhere"}},
        {"name": "half", "merge": {"of": "broken", "alpha": 0.5}},
        SWEEP["arm"][1],
    ]
    result, _ = sweep(tmp_path, arm=arms)
    assert list(result.failures) == ["train broken, seed 0"]
    assert "nowhere" in str(result.failures["train broken, seed 0"])
    assert result.skipped == (
        "evaluate broken, seed 0",
        "merge half, seed 0",
        "evaluate half, seed 0",
    )
    assert [row.arm.label for row in compare_runs([result.folder]).arms] == ["none"]
