"""`craft train` without a cache: one command that makes its own anchors."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny.act import ACT, STATE_ONLY
from tiny.smolvla import SMOLVLA
from tiny.world import TASKS, write_dataset

from craftcli.errors import EXIT_USAGE

STEPS = ("--steps", 2, "--batch-size", 4, "--anchor-batch-size", 4, "--device", "cpu")
NAME = r"anchors-[0-9a-f]{12}\.zarr"


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of the new task."""
    return write_dataset(tmp_path_factory.mktemp("data") / "new")


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that reads states alone."""
    return STATE_ONLY.make(tmp_path_factory.mktemp("states") / "policy")


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that reads images and instructions."""
    return SMOLVLA.make(tmp_path_factory.mktemp("speaking") / "policy")


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_demo_in_an_empty_folder(craft: Callable[..., Any], tmp_path: Path) -> None:
    first = craft("train", *STEPS, "-o", "runs/first", "--anchor-samples", 40)
    assert first.exit_code == 0, first.output
    said = one_line(first.stdout)
    assert said.startswith(
        "Anchors: 40 frames of the new data under 3 old instructions; no old data is needed. In "
        "the demo this kept 1.00 of three old instructions"
    )
    built = re.search(rf"Built (runs/{NAME}): 40 rows, [\d.]+ KiB, in \d+ s\.", said)
    assert built
    assert f"cache {built[1]} (made)" in said
    assert "anchor cache loaded: 40 rows" in said
    assert "L_ret at the teacher's weights: 0 (0 to rounding)" in said
    assert "Warning" not in first.stderr
    assert {entry.name for entry in (tmp_path / "runs").iterdir()} == {"first", Path(built[1]).name}

    second = craft("train", *STEPS, "--seed", 1, "--anchor-samples", 40, "--json")
    assert second.exit_code == 0, second.output
    assert f"Reusing {built[1]}: 40 rows" in one_line(second.stderr)
    document = json.loads(second.stdout)
    anchors = document["anchors"]
    assert (anchors["source"], anchors["rows"]) == ("old_instructions", 40)
    assert anchors["reused"] is True
    assert anchors["cache"] == built[1]
    assert document["settings"]["cache"] == str(tmp_path / built[1])
    assert len(list((tmp_path / "runs").glob("anchors-*"))) == 1


def test_a_run_with_its_own_anchors_resumes(craft: Callable[..., Any], tmp_path: Path) -> None:
    sizes = ("--steps", 4, "--save-every", 2, *STEPS[2:], "--anchor-samples", 16)
    whole = craft("train", *sizes, "-o", "runs/one")
    assert whole.exit_code == 0, whole.output
    run, half = tmp_path / "runs/one", tmp_path / "runs/half"
    shutil.copytree(run, half, symlinks=True)
    shutil.rmtree(half / "checkpoints/000004")
    (half / "checkpoints/last").unlink()
    (half / "checkpoints/last").symlink_to("000002")
    resumed = craft("train", "--resume", half)
    assert resumed.exit_code == 0, resumed.output
    assert "Anchors:" not in resumed.output
    assert "anchor cache loaded: 16 rows" in resumed.stdout
    weights = "checkpoints/last/pretrained_model/model.safetensors"
    assert (half / weights).read_bytes() == (run / weights).read_bytes()
    (cache,) = (tmp_path / "runs").glob("anchors-*.zarr")
    shutil.rmtree(cache)
    lost = craft("train", "--resume", half, "--device", "cpu")
    assert lost.exit_code == 1
    assert f"No cache at {cache}" in one_line(lost.stderr)


def test_states_from_statistics_and_what_eval_makes_of_them(
    craft: Callable[..., Any], states: Path, new: Path
) -> None:
    policy = ("--policy", states, "--dataset", new)
    trained = craft("train", *STEPS, *policy, "--anchor-samples", 64, "-o", "runs/one", "--json")
    assert trained.exit_code == 0, trained.output
    anchors = json.loads(trained.stdout)["anchors"]
    assert (anchors["source"], anchors["rows"]) == ("statistics", 64)
    assert "64 states drawn from the statistics of the policy's normaliser" in trained.stderr
    evaluated = craft("eval", "runs/one", "--samples", 4, "--device", "cpu", "--json")
    assert evaluated.exit_code == 0, evaluated.output
    found = json.loads(evaluated.stdout)
    assert found["left_out"] == []
    assert found["drift"]["rows"] == 64
    assert [loss["group"] for loss in found["losses"]] == ["new"]


def test_new_frames_under_old_instructions_are_no_old_data(
    craft: Callable[..., Any], speaking: Path, new: Path, tmp_path: Path
) -> None:
    (tmp_path / "old.txt").write_text("open the drawer\n")
    policy = ("--policy", speaking, "--dataset", new, "--old-tasks", "old.txt")
    trained = craft("train", *STEPS, *policy, "-o", "runs/one")
    assert trained.exit_code == 0, trained.output
    assert "Anchors: 16 frames of the new data under 1 old instruction;" in trained.stdout
    assert "the dataset that is trained on" not in trained.stderr
    evaluated = craft("eval", "runs/one", "--samples", 4, "--device", "cpu", "--json")
    assert [loss["group"] for loss in json.loads(evaluated.stdout)["losses"]] == ["new"]


def test_old_frames_are_varied(
    craft: Callable[..., Any], states: Path, new: Path, tmp_path: Path
) -> None:
    old = write_dataset(tmp_path / "old", seed=8)
    policy = ("--policy", states, "--dataset", new, "--old-dataset", old)
    trained = craft("train", *STEPS, *policy, "--anchor-samples", 64, "--json")
    assert trained.exit_code == 0, trained.output
    anchors = json.loads(trained.stdout)["anchors"]
    assert (anchors["source"], anchors["rows"]) == ("old_frames", 64)
    assert anchors["about"] == "16 frames of the old data old and 48 variations of them"


class TestErrors:
    def refused(self, craft: Callable[..., Any], *arguments: Any, exit_code: int) -> str:
        result = craft("train", *STEPS, *arguments)
        assert result.exit_code == exit_code, result.output
        assert not Path("runs").exists()
        return one_line(result.stderr)

    def test_images_alone(self, craft: Callable[..., Any], new: Path, tmp_path: Path) -> None:
        policy = ("--policy", ACT.make(tmp_path / "policy"), "--dataset", new)
        error = self.refused(craft, *policy, exit_code=EXIT_USAGE)
        assert "There is no cache, and nothing to make anchors of for this policy." in error
        assert "Only old frames show what it used to see" in error

    def test_unknown_instructions(
        self, craft: Callable[..., Any], speaking: Path, new: Path
    ) -> None:
        policy = ("--policy", speaking, "--dataset", new)
        error = self.refused(craft, *policy, exit_code=EXIT_USAGE)
        assert "the old instructions with --old-tasks (a file or a dataset)" in error
        same = self.refused(craft, *policy, "--old-tasks", new, exit_code=EXIT_USAGE)
        assert f"'{TASKS[0]}' is one of the new data" in same

    def test_a_cache_that_was_named_and_is_missing(self, craft: Callable[..., Any]) -> None:
        for name in ("nowhere.zarr", "anchors.zarr"):
            error = self.refused(craft, "--cache", name, exit_code=1)
            assert f"No cache at {name}" in error

    def test_a_cache_in_the_file_of_settings(
        self, craft: Callable[..., Any], tmp_path: Path
    ) -> None:
        (tmp_path / "run.toml").write_text('cache = "anchors.zarr"\n')
        error = self.refused(craft, "--config", "run.toml", exit_code=1)
        assert "No cache at anchors.zarr" in error

    def test_no_anchors_are_made_with_anchors_cache(self, craft: Callable[..., Any]) -> None:
        assert "No cache at anchors.zarr" in self.refused(craft, "--anchors", "cache", exit_code=1)

    def test_old_tasks_that_do_not_exist_are_refused_before_the_policy_is_loaded(
        self, craft: Callable[..., Any], new: Path
    ) -> None:
        policy = ("--policy", "me/nowhere", "--dataset", new)
        error = self.refused(craft, *policy, "--old-tasks", "old.txt", exit_code=EXIT_USAGE)
        assert "Cannot read the old instructions from old.txt." in error


def test_the_dry_run_shows_the_same_choice(
    craft: Callable[..., Any], states: Path, new: Path, tmp_path: Path
) -> None:
    policy = ("--policy", states, "--dataset", new)
    result = craft("dryrun", *STEPS, *policy, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["anchors"]["source"], document["anchors"]["rows"]) == ("statistics", 4096)
    detail = document["checks"][2]["detail"]
    assert detail.startswith(
        "the run makes 4096 states drawn from the statistics of the policy's normaliser; no old "
        "data is needed; tried with a temporary cache: 32 rows"
    )
    assert list(tmp_path.iterdir()) == []
    act = ACT.make(tmp_path / "act")
    failed = craft("dryrun", *STEPS, "--policy", act, "--dataset", new)
    assert failed.exit_code == 3
    assert "✗ failed: Cache matches the teacher: There is no cache" in failed.stdout


class TestPrompts:
    def build(self, craft: Callable[..., Any], lines: str, *arguments: Any) -> str:
        Path("prompts.txt").write_text(lines)
        built = craft("cache", "build", "--prompts", "prompts.txt", "--samples", 8, *arguments)
        assert built.exit_code == 0, built.output
        return one_line(built.stderr)

    def test_that_change_nothing(self, craft: Callable[..., Any]) -> None:
        said = self.build(craft, "{task}\n")
        assert "--prompts prompts.txt changes no instruction: every frame keeps its own." in said
        assert "such anchors oppose the task" in said

    def test_that_change_something(self, craft: Callable[..., Any]) -> None:
        assert "Warning" not in self.build(craft, "{task}\nplease {task}\n")

    def test_that_nobody_reads(self, craft: Callable[..., Any], states: Path, new: Path) -> None:
        said = self.build(craft, "move\n", "--policy", states, "--dataset", new)
        assert "has no effect: policies of type act read no instructions." in said

    @pytest.mark.parametrize(
        ("lines", "opposing"), [("open the drawer\n", 0), ("{task}\n", 16)], ids=["other", "same"]
    )
    def test_training_on_the_same_data(
        self, craft: Callable[..., Any], speaking: Path, new: Path, lines: str, opposing: int
    ) -> None:
        policy = ("--policy", speaking, "--dataset", new)
        self.build(craft, lines, *policy, "--samples", 16)
        trained = craft("train", *STEPS, *policy)
        assert trained.exit_code == 0, trained.output
        warning = f"the dataset that is trained on: {opposing} of them show its frames under"
        assert (warning in one_line(trained.stderr)) is (opposing > 0)


@pytest.mark.slow
def test_under_torchrun_every_process_builds_its_share(
    craft: Callable[..., Any], tmp_path: Path
) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
    words = ("train", *map(str, STEPS), "--anchor-samples", "16", "--json")
    result = subprocess.run(
        (*torchrun, "-m", "craftcli", *words), cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    alone = craft(*words, "--overwrite")
    assert alone.exit_code == 0, alone.output
    for text, reused in ((result.stdout, False), (alone.stdout, True)):
        anchors = json.loads(text)["anchors"]
        assert (anchors["rows"], anchors["reused"]) == (16, reused)
    assert len(list((tmp_path / "runs").glob("anchors-*.zarr"))) == 1
