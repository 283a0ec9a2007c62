"""`craft eval` on a run of the demo, and on what it cannot evaluate."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny.act
from typer.testing import CliRunner

from craftcli.cache.reading.reader import CacheReader
from craftcli.cli.app import app
from craftcli.evaluation.results import Evaluation
from craftcli.policies.layer_paths import layer_lists

QUICK = ("--episodes", "2", "--samples", "6", "--device", "cpu")


@pytest.fixture(scope="module")
def run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "hidden"
    flags = f"--steps 2 --batch-size 2 --anchor-batch-size 2 --device cpu --cache {cache}"
    result = CliRunner().invoke(app, ["train", *flags.split(), "--output", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def test_a_run_is_evaluated_on_all_it_knows_of(
    craft: Callable[..., Any], run: Path, cache: Path, tmp_path: Path
) -> None:
    result = craft("eval", run, *QUICK, "--plot", "drift.png", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    kept = Evaluation.load(run / "evaluations/evaluation.json")
    assert Evaluation.from_json(document) == kept
    assert kept.policy.step == 2
    assert kept.drift is not None
    assert kept.drift.cache == str(cache)
    assert kept.drift.shared_rows == kept.drift.rows == 32
    assert kept.drift.action is not None
    assert [loss.group for loss in kept.losses] == ["old", "new"]
    assert [s.environment for s in kept.success] == [
        "demo:red",
        "demo:green",
        "demo:yellow",
        "demo:blue",
    ]
    (command,) = re.findall(r"held-out ones: craft (cache build --exclude .*)", result.stderr)
    # The command that is recommended works, and its anchors are held out.
    built = craft(*shlex.split(command))
    assert built.exit_code == 0, built.output
    held_out = craft("eval", run, "--cache", "held_out.zarr", "--name", "held-out", "--json")
    assert json.loads(held_out.stdout)["drift"]["shared_rows"] == 0
    assert (tmp_path / "drift.png").stat().st_size > 10_000


def test_held_out_anchors_of_a_run_that_made_its_own(craft: Callable[..., Any]) -> None:
    """The demo as a new user runs it: no cache, so that the anchors show the new data."""
    sizes = ("--steps", 1, "--batch-size", 2, "--anchor-batch-size", 2, "--anchor-samples", 8)
    trained = craft("train", *sizes, "--device", "cpu", "-o", "runs/own")
    assert trained.exit_code == 0, trained.output
    shown = craft("eval", "runs/own", *QUICK, "--max-steps", 2, "--no-teacher-success")
    (command,) = re.findall(r"held-out ones: craft (cache build .*)", shown.stderr)
    assert "--exclude" not in command
    built = craft(*shlex.split(command))
    assert built.exit_code == 0, built.output
    measured = craft("eval", "runs/own", "--cache", "held_out.zarr", "--json")
    assert measured.exit_code == 0, measured.output
    drift = Evaluation.from_json(json.loads(measured.stdout)).drift
    assert drift is not None
    assert (drift.rows, drift.shared_rows) == (128, 0)
    assert drift.l_ret["hidden"] > 0
    assert "held-out ones" not in measured.stderr


def test_the_teachers_losses_stand_beside_the_runs(craft: Callable[..., Any], run: Path) -> None:
    command = ("eval", run, *QUICK, "--dataset", "demo", "--name", "beside")
    shown = craft(*command)
    assert shown.exit_code == 0, shown.output
    kept = Evaluation.load(run / "evaluations/beside.json")
    own, theirs = kept.losses, kept.teacher_losses
    assert [(loss.fingerprint, loss.frames, loss.seed) for loss in own] == [
        (loss.fingerprint, loss.frames, loss.seed) for loss in theirs
    ]
    # Two steps have changed the policy, and the teacher is as good as evaluated alone.
    assert all(mine.mean != other.mean for mine, other in zip(own, theirs, strict=True))
    alone = json.loads(craft("eval", "demo", *QUICK, "--dataset", "demo", "--json").stdout)
    assert [loss.mean for loss in theirs] == [loss["mean"] for loss in alone["losses"]]
    assert alone["teacher_losses"] == []
    for mine, other in zip(own, theirs, strict=True):
        assert f"{mine.mean:.4f}  teacher {other.mean:.4f}" in shown.stdout
        for task, mean in mine.by_task.items():
            assert f"{mean:.4f}  teacher {other.by_task[task]:.4f}" in shown.stdout
    without = craft(*command, "--no-teacher-success", "--json")
    assert json.loads(without.stdout)["teacher_losses"] == []


def test_a_teacher_of_another_kind_is_left_out(
    craft: Callable[..., Any], run: Path, tmp_path: Path
) -> None:
    other = tiny.act.make_state_only(tmp_path / "act")
    result = craft("eval", run, *QUICK, "--dataset", "demo", "--teacher", other, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["teacher_losses"] == []
    assert (
        "what the teacher does: it is a act, the policy a craft_tiny_pi0_fast"
        in (found["left_out"])
    )


def test_with_something_named_nothing_else_is_done(craft: Callable[..., Any], run: Path) -> None:
    checkpoint = run / "checkpoints/last/pretrained_model"
    result = craft("eval", checkpoint, *QUICK, "--env", "demo:blue", "--name", "blue")
    assert result.exit_code == 0, result.output
    kept = Evaluation.load(run / "evaluations/blue.json")
    assert kept.drift is None
    assert not kept.losses
    (success,) = kept.success
    assert len(success.episodes) == 2
    assert "demo:blue (new)" in result.stdout
    assert "95 % interval" in result.stdout


def test_it_begins_with_the_verdict_on_the_run(
    craft: Callable[..., Any], run: Path, tmp_path: Path
) -> None:
    """That of the checkpoint that is evaluated; without one, in earlier versions, there is none."""
    on_red = ("--env", "demo:red", "--episodes", 1, "--max-steps", 1)
    shown = craft("eval", run, *on_red)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("Too few retention steps to judge the budget")
    found = json.loads(craft("eval", run, *on_red, "--json").stdout)
    assert found["verdict"]["outcome"] == "unknown"
    # A copy without digests, so that its state can be changed.
    copy = Path(shutil.copytree(run, tmp_path / "copy", symlinks=True))
    saved = copy / "checkpoints/last"
    (saved / "craft_manifest.json").unlink()
    state = json.loads((saved / "craft_state.json").read_text())
    state["verdict"] |= {"outcome": "exceeded", "finding": "A.", "advice": "B."}
    (saved / "craft_state.json").write_text(json.dumps(state))
    assert "Warning: A. B." in craft("eval", copy, *on_red).stderr
    del state["verdict"]
    (saved / "craft_state.json").write_text(json.dumps(state))
    assert json.loads(craft("eval", copy, *on_red, "--json").stdout)["verdict"] is None


def test_the_demos_teacher_needs_no_run(craft: Callable[..., Any], tmp_path: Path) -> None:
    kept = tmp_path / "teacher.json"
    result = craft("eval", "demo", *QUICK, "--dataset", "demo", "--output", kept)
    assert result.exit_code == 0, result.output
    old, new = Evaluation.load(kept).losses
    assert old.mean < new.mean
    assert "Loss on craft-demo/old (old)" in result.stdout


def test_a_run_without_checkpoints_says_so(craft: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/craft_config.json").write_text("{}")
    result = craft("eval", "empty")
    assert result.exit_code == 1
    assert "has no checkpoint" in result.stderr


def test_a_policy_alone_needs_something_to_be_evaluated_on(
    craft: Callable[..., Any], tmp_path: Path
) -> None:
    result = craft("eval", tiny.act.make_state_only(tmp_path / "act"))
    assert result.exit_code == 2
    assert "name a --cache, a --dataset or an --env" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--env", "nowhere"), "Unknown environment 'nowhere'"),
        (("--env", "demo:red", "--plot", "drift.png"), "There is no drift to plot"),
        (("--plot", "drift.jpg"), "does not end in .png"),
        (("--name", "../out"), "becomes the name of a file"),
    ],
)
def test_what_makes_no_sense_is_refused(
    craft: Callable[..., Any], run: Path, flags: tuple[str, ...], message: str
) -> None:
    result = craft("eval", run, *flags)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_cache_of_another_policy_is_refused(
    craft: Callable[..., Any], cache: Path, tmp_path: Path
) -> None:
    result = craft("eval", tiny.act.make_state_only(tmp_path / "act"), "--cache", cache)
    assert result.exit_code == 1
    assert "its teacher is a craft_tiny_pi0_fast, the policy a act" in result.stderr


def test_a_cache_of_a_stack_by_its_path_is_evaluated(
    craft: Callable[..., Any], teacher: Any, build: Callable[..., Path], tmp_path: Path
) -> None:
    """Such a cache needs the adapter for paths, which only its manifest can tell."""
    path = next(name for name in layer_lists(teacher.policy) if "vision" in name)
    cache = build(tmp_path / "a.zarr", samples=4, stack=path, layers="0,1", kind="hidden+action")
    result = craft("eval", "demo", "--cache", cache, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    drift = Evaluation.from_json(json.loads(result.stdout)).drift
    assert drift is not None
    assert [layer.layer for layer in drift.layers] == [f"{path}.0", f"{path}.1"]
    assert all(layer.nmse < 1e-6 for layer in drift.layers)


def test_a_cache_is_opened_once(
    craft: Callable[..., Any], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    create = CacheReader.__init__

    def counting(self: CacheReader, path: Any, *rest: Any, **settings: Any) -> None:
        opened.append(path)
        create(self, path, *rest, **settings)

    monkeypatch.setattr(CacheReader, "__init__", counting)
    result = craft("eval", run, *QUICK, "--name", "again")
    assert result.exit_code == 0, result.output
    assert len(opened) == 1
