"""A run works from any folder and after a move; it is extended; lerobot-train may continue it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from craftcli.cli.app import app
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.engine.summary_file import RunSummary
from craftcli.errors import EXIT_USAGE
from craftcli.evaluation.results import Evaluation

WEIGHTS = "checkpoints/last/pretrained_model/model.safetensors"
SIZES = ("--batch-size", "2", "--anchor-batch-size", "2", "--log-every", "1", "--device", "cpu")
CONSTANT = ("--lr-schedule", "constant", "--save-every", "2")
QUICK = ("--episodes", "2", "--samples", "4", "--device", "cpu")


def craft_in(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Any:
    monkeypatch.chdir(folder)
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy, a cache, and a run of four steps that was given relative paths."""
    work = tmp_path_factory.mktemp("home") / "work"
    work.mkdir()
    shutil.copytree(TEACHER_FOLDER, work / "teacher")
    shutil.copytree(cache, work / "anchors.zarr")
    with pytest.MonkeyPatch.context() as patch:
        flags = ("--policy", "teacher", "--dataset", "demo", "--cache", "anchors.zarr")
        result = craft_in(
            work, patch, "train", *flags, *SIZES, *CONSTANT, "--steps", 4, "-o", "runs/a"
        )
    assert result.exit_code == 0, result.output
    return work


@pytest.fixture
def work(trained: Path, tmp_path: Path) -> Path:
    """The same, moved elsewhere as a whole; nothing is left where it was recorded."""
    moved = Path(shutil.copytree(trained, tmp_path / "moved", symlinks=True))
    for run in (moved / "runs").iterdir():
        for file in (run / "craft_config.json", *run.glob("checkpoints/0*/craft_config.json")):
            assert str(trained) in file.read_text()
    return moved


@pytest.fixture
def gone(trained: Path) -> Any:
    """The place in which the run was trained does not exist during a test."""
    hidden = trained.rename(trained.with_name("hidden"))
    yield
    hidden.rename(trained)


def test_a_moved_run_resumes_from_another_folder(
    work: Path, trained: Path, gone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = work / "runs/a"
    shutil.rmtree(run / "checkpoints/000004")
    (run / "checkpoints/last").unlink()
    (run / "checkpoints/last").symlink_to("000002")
    expected = (trained.with_name("hidden") / "runs/a" / WEIGHTS).read_bytes()
    for _ in range(2):
        result = craft_in(tmp_path, monkeypatch, "train", "--resume", "moved/runs/a")
        assert result.exit_code == 0, result.output
        assert (run / WEIGHTS).read_bytes() == expected
    # The cache of the run may be named, in any spelling; another one may not.
    same = craft_in(
        tmp_path, monkeypatch, "train", "--resume", run, "--cache", "moved/anchors.zarr"
    )
    assert same.exit_code == 0, same.output
    other = craft_in(tmp_path, monkeypatch, "train", "--resume", run, "--cache", "b.zarr")
    assert other.exit_code == EXIT_USAGE
    assert "--cache was" in other.stderr
    inspected = craft_in(tmp_path, monkeypatch, "inspect", run, "--json")
    assert inspected.exit_code == 0, inspected.output
    found = json.loads(inspected.stdout)
    assert {d["kind"]: d["state"] for d in found["depends"]} == {
        "cache": "unchanged",
        "dataset": "unchanged",
    }
    assert found["settings"]["policy"] == str(work / "teacher")


def test_a_moved_run_is_evaluated_with_its_drift_and_no_evaluation_replaces_another(
    work: Path, gone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = work / "runs/a"
    first = craft_in(tmp_path, monkeypatch, "eval", run, *QUICK, "--json")
    assert first.exit_code == 0, first.output
    whole = Evaluation.load(run / "evaluations/evaluation.json")
    assert whole.drift is not None
    assert whole.left_out == ()
    again = craft_in(tmp_path, monkeypatch, "eval", run, *QUICK)
    assert "evaluations/evaluation.json" in again.output
    lesser = ("--env", "demo", "--episodes", 1, "--device", "cpu")
    smaller = craft_in(tmp_path, monkeypatch, "eval", run, *lesser)
    assert smaller.exit_code == 0, smaller.output
    files = sorted(file.name for file in (run / "evaluations").glob("*.json"))
    assert files == ["evaluation-2.json", "evaluation.json"]
    assert Evaluation.load(run / "evaluations/evaluation.json") == whole
    compared = craft_in(tmp_path, monkeypatch, "compare", run, "-o", "page", "--json")
    assert compared.exit_code == 0, compared.output
    from craftcli.compare.runs import read_measured

    measured = read_measured(run)
    assert measured is not None
    assert {len(s.episodes) for s in measured.successes.values()} == {2}
    assert measured.drift is not None


def test_a_moved_run_is_merged_with_its_teacher(
    work: Path, gone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = craft_in(tmp_path, monkeypatch, "merge", work / "runs/a", "--alpha", 0.5, "-o", "half")
    assert result.exit_code == 0, result.output
    made = json.loads((tmp_path / "half/craft_merge.json").read_text())
    assert made["teacher"] == str(work / "teacher")


def test_an_extended_run_ends_as_one_that_was_that_long_from_the_start(
    trained: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--policy", "teacher", "--dataset", "demo", "--cache", "anchors.zarr")
    long = craft_in(
        trained, monkeypatch, "train", *flags, *SIZES, *CONSTANT, "--steps", 6, "-o", tmp_path / "b"
    )
    assert long.exit_code == 0, long.output
    run = work / "runs/a"
    result = craft_in(tmp_path, monkeypatch, "train", "--resume", run, "--steps", 6)
    assert result.exit_code == 0, result.output
    assert "was to end after 4 steps and now ends after 6" in result.stdout
    assert "Step 5/6 |" in result.stdout
    assert (run / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()
    summary = RunSummary.read(run)
    assert summary is not None
    assert (summary.steps, summary.steps_done) == (6, 6)
    # All checkpoints are whole, those from before the extension too.
    inspected = craft_in(tmp_path, monkeypatch, "inspect", run, "--json")
    assert inspected.exit_code == 0, inspected.output
    found = json.loads(inspected.stdout)
    assert (found["state"], found["steps"]) == ("finished", 6)
    # Without --steps the run keeps its new length, also from an earlier checkpoint.
    back = craft_in(tmp_path, monkeypatch, "train", "--resume", run, "--from", 2)
    assert back.exit_code == 0, back.output
    assert (run / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()


def test_a_run_cannot_end_before_what_it_has_done(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = work / "runs/a"
    before = (run / "craft_config.json").read_bytes()
    result = craft_in(tmp_path, monkeypatch, "train", "--resume", run, "--steps", 3)
    assert result.exit_code == EXIT_USAGE
    assert "it has taken 4 already" in result.stderr
    both = craft_in(tmp_path, monkeypatch, "train", "--resume", run, "--steps", 9, "--lr", 1)
    assert both.exit_code == EXIT_USAGE
    assert "--lr was None and is 1.0" in both.stderr
    assert "--steps" not in both.stderr.partition("Fix")[0]
    assert (run / "craft_config.json").read_bytes() == before


def test_a_run_that_lerobot_continued_is_recognised(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick stand-in; `tests/examples/test_users_day.py` has lerobot-train continue a run."""
    run = work / "runs/a"
    theirs = run / "checkpoints/000006"
    # What lerobot-train writes: the policy and its training state, and nothing of craft's.
    for part in ("pretrained_model", "training_state"):
        shutil.copytree(run / "checkpoints/000004" / part, theirs / part)
    (run / "checkpoints/last").unlink()
    (run / "checkpoints/last").symlink_to("000006")
    refused = craft_in(tmp_path, monkeypatch, "train", "--resume", run)
    assert refused.exit_code == EXIT_USAGE
    assert "lerobot-train has continued it" in refused.stderr
    assert "--from 4" in refused.stderr
    inspected = craft_in(tmp_path, monkeypatch, "inspect", run)
    assert inspected.exit_code == 0, inspected.output
    assert "lerobot-train continued it from step 4 to 6" in inspected.stdout
    assert "--from 4" in inspected.stderr
    measured = craft_in(
        tmp_path, monkeypatch, "eval", run, "--env", "demo", "--episodes", 1, "--json"
    )
    assert measured.exit_code == 0, measured.output
    assert json.loads(measured.stdout)["policy"]["step"] == 6
    assert "lerobot-train has continued this run" in measured.stderr
    compared = craft_in(tmp_path, monkeypatch, "compare", run, "-o", "page")
    assert f"lerobot-train has continued {run}" in one_line(compared.stderr)
    back = craft_in(tmp_path, monkeypatch, "train", "--resume", run, "--from", 4, "--steps", 5)
    assert back.exit_code == 0, back.output
    assert (run / "set-aside-from-000004/000006").is_dir()
    assert (run / "checkpoints/last").readlink() == Path("000005")


def test_an_unfinished_extension_is_not_forgotten(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed between the extension and its next checkpoint resumes to its new end."""
    run = work / "runs/a"
    own = json.loads((run / "craft_config.json").read_text())
    (run / "craft_config.json").write_text(json.dumps({**own, "steps": 5}, indent=2))
    result = craft_in(tmp_path, monkeypatch, "train", "--resume", run)
    assert result.exit_code == 0, result.output
    assert "Step 5/5 |" in result.stdout
    changed = {**own, "steps": 5, "seed": 1}
    (run / "craft_config.json").write_text(json.dumps(changed, indent=2))
    assert craft_in(tmp_path, monkeypatch, "inspect", run).exit_code == 3


def test_the_learning_rate_follows_the_schedule_of_the_new_length(
    cache: Path, craft: Callable[..., Any], tmp_path: Path
) -> None:
    sizes = (*SIZES, "--cache", cache, "--lr-schedule", "cosine", "--save-every", 2)

    def rates(run: Path) -> list[float]:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["lr"] for line in lines]

    assert craft("train", *sizes, "--steps", 8, "-o", "long").exit_code == 0
    assert craft("train", *sizes, "--steps", 4, "-o", "short").exit_code == 0
    assert rates(tmp_path / "short") != rates(tmp_path / "long")[:4]
    extended = craft("train", "--resume", "short", "--steps", 8)
    assert extended.exit_code == 0, extended.output
    assert rates(tmp_path / "short")[4:] == pytest.approx(rates(tmp_path / "long")[4:])
