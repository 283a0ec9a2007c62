"""`craft train --eval-every`: figures while training, the best checkpoint, early stopping."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from craftcli.cli.app import app
from craftcli.engine.summary_file import RunSummary
from craftcli.errors import EXIT_USAGE

WEIGHTS = "checkpoints/last/pretrained_model/model.safetensors"
STATE = "checkpoints/last/training_state/rng_state.safetensors"
SIZES = ("--batch-size", "2", "--anchor-batch-size", "2", "--log-every", "1", "--device", "cpu")
HELD = ("--held-out-share", "0.5", "--save-every", "2")
MEASURED = ("--eval-every", "2", "--eval-dataset", "demo", "--eval-env", "demo:blue")
WORLDS = (*MEASURED, "--eval-old-env", "demo:red", "--eval-episodes", "1")


def train(*arguments: Any) -> Any:
    result = CliRunner().invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def figures(run: Path) -> list[dict[str, Any]]:
    """What was measured, without the times of steps."""
    return [{k: v for k, v in line.items() if not k.endswith("_s")} for line in lines(run)]


@pytest.fixture(scope="module")
def runs(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same six steps, once without and once with measurements."""
    folder = tmp_path_factory.mktemp("runs")
    common = (*SIZES, *HELD, "--steps", 6, "--cache", cache)
    train(*common, "-o", folder / "plain")
    printed = train(*common, *WORLDS, "-o", folder / "measured").stdout
    (folder / "printed.txt").write_text(printed)
    return folder


def test_measuring_changes_no_bit_of_the_training(runs: Path) -> None:
    for file in (WEIGHTS, STATE):
        plain, measured = (runs / name / file for name in ("plain", "measured"))
        assert plain.read_bytes() == measured.read_bytes()


def test_the_figures_are_in_the_log_and_on_the_screen(runs: Path) -> None:
    found = lines(runs / "measured")
    measured = [line for line in found if line["eval_new_loss"] is not None]
    assert [line["step"] for line in measured] == [0, 2, 4, 6]
    start, last = measured[0], measured[-1]
    # At the start the policy is its teacher.
    assert start["eval_old_loss"] == pytest.approx(0, abs=1e-6)
    assert start["eval_old_success"] == 1.0
    assert start["loss"] is None
    assert last["eval_old_loss"] > 1e-6
    assert last["eval_new_loss"] < start["eval_new_loss"]
    assert all(line["eval_new_success"] in (0.0, 1.0) for line in measured)
    assert [line["step"] for line in found if line["step"]] == [1, 2, 3, 4, 5, 6]
    printed = (runs / "printed.txt").read_text()
    assert "anchors that are not trained on" in printed
    assert "1 episodes in each of demo:blue (new), demo:red (old)" in printed
    assert "eval_old=" in printed
    assert "Best checkpoint:" in printed


def test_the_best_checkpoint_has_a_link_and_opens(runs: Path, craft: Callable[..., Any]) -> None:
    run = runs / "measured"
    best = (run / "checkpoints/best").readlink()
    assert int(best.name) == lines(run)[-1]["eval_best"]
    result = craft("eval", run / "checkpoints/best", "--env", "demo:red", "--episodes", 1)
    assert result.exit_code == 0, result.output
    inspected = craft("inspect", run)
    assert inspected.exit_code == 0, inspected.output
    assert "best" in inspected.stdout


def test_a_resumed_run_measures_and_ends_as_an_undisturbed_one(runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "measured", tmp_path / "run", symlinks=True))
    for step in ("000004", "000006"):
        shutil.rmtree(run / "checkpoints" / step)
    (run / "checkpoints/last").unlink()
    (run / "checkpoints/last").symlink_to("000002")
    train("--resume", run)
    whole = runs / "measured"
    assert (run / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert figures(run) == figures(whole)
    best = "checkpoints/best"
    assert (run / best).readlink() == (whole / best).readlink()


def test_it_stops_early_keeps_few_checkpoints_and_is_finished_then(
    cache: Path, craft: Callable[..., Any], tmp_path: Path
) -> None:
    # Without a learning rate worth the name nothing gets better than at first.
    slow = ("--lr", "1e-12", "--lr-schedule", "constant", "--cache", cache, "--steps", 20)
    measured = ("--eval-every", 1, "--patience", 3, "--save-every", 1, "--keep-last", 2)
    result = craft("train", *SIZES, *slow, *measured, "-o", "run")
    assert result.exit_code == 0, result.output
    assert "Stopped early: 3 measurements in a row" in result.stdout
    run = tmp_path / "run"
    summary = RunSummary.read(run)
    assert summary is not None
    assert summary.stopped_early
    assert summary.complete
    done = summary.steps_done
    assert 3 < done < 20
    best = int((run / "checkpoints/best").readlink().name)
    steps = {int(f.name) for f in (run / "checkpoints").iterdir() if f.name.isdecimal()}
    assert steps == {best, done - 1, done}
    again = craft("train", "--resume", "run")
    assert again.exit_code == 0, again.output
    assert "has stopped early" in again.stdout
    assert "finished" in craft("inspect", "run").stdout
    on = craft("train", "--resume", "run", "--patience", 0, "--steps", done + 1)
    assert on.exit_code == 0, on.output
    assert int((run / "checkpoints/last").readlink().name) == done + 1


def test_the_teacher_is_rolled_out_once_beside_the_run(
    runs: Path, craft: Callable[..., Any], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs / "plain", tmp_path / "run", symlinks=True))
    command = ("eval", run, "--env", "demo:red", "--env", "demo:blue", "--episodes", 2)
    result = craft(*command, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    # It knows the old task and not the new one, in the same episodes.
    found = {s["environment"]: s for s in document["teacher_success"]}
    assert (found["demo:red"]["rate"], found["demo:blue"]["rate"]) == (1.0, 0.0)
    seeds = [[e["seed"] for e in s["episodes"]] for s in document["success"]]
    assert seeds == [[e["seed"] for e in s["episodes"]] for s in document["teacher_success"]]
    kept = {file: file.stat().st_mtime_ns for file in (run / "evaluations/teacher").iterdir()}
    assert len(kept) == 2
    again = craft(*command)
    assert "teacher 1.00" in again.stdout
    assert kept == {f: f.stat().st_mtime_ns for f in (run / "evaluations/teacher").iterdir()}
    # A damaged file is measured again.
    damaged = next(iter(kept))
    before = damaged.read_text()
    damaged.write_text(before.replace("true", "false"))
    assert "teacher 1.00" in craft(*command).stdout
    without = craft(*command, "--no-teacher-success")
    assert "teacher 1.00" not in without.stdout


def test_a_dry_run_measures_once(craft: Callable[..., Any], cache: Path) -> None:
    sizes = ("--batch-size", 2, "--anchor-batch-size", 2, "--device", "cpu", "--cache", cache)
    result = craft("dryrun", *sizes, "--steps", 1, "--eval-every", 5)
    assert result.exit_code == 0, result.output
    assert "Before the first step: eval_old=" in result.stdout


def test_settings_that_need_measurements_are_refused_without(craft: Callable[..., Any]) -> None:
    result = craft("train", "--patience", 2, "--eval-env", "demo:blue")
    assert result.exit_code == EXIT_USAGE
    assert "--eval-env needs --eval-every" in result.stderr
    assert "--patience needs --eval-every" in result.stderr
    unknown = craft("train", "--eval-every", 2, "--eval-env", "nowhere:x")
    assert unknown.exit_code == EXIT_USAGE
