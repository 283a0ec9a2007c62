"""`craft train --old-env`: anchors from episodes in which the policy acts itself."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from craftcli.cache.reading.reader import CacheReader
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.run import open_run
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.sweeps.runner import run_sweep
from craftcli.sweeps.sweep_file import SweepSpec

SMALL = ("--steps", 1, "--batch-size", 4, "--anchor-batch-size", 4, "--device", "cpu")
ENV = ("--old-env", "demo:red,demo:green", "--old-env-episodes", 2)


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_a_run_records_its_anchors_once(craft: Callable[..., Any], tmp_path: Path) -> None:
    first = craft("train", *SMALL, *ENV, "-o", "runs/one", "--anchor-samples", 16)
    assert first.exit_code == 0, first.output
    said = one_line(first.stdout)
    assert (
        "Anchors: up to 16 frames that the policy sees when it acts itself, in 2 episodes of each "
        "of demo:red, demo:green; no old data is needed. They hold what the policy does" in said
    )
    assert "The teacher acted in 2 episodes of demo:green and succeeded in 2." in said
    assert "Drew 16 of the 24 frames that it saw." in said
    assert "anchor cache loaded: 16 rows" in said
    (cache,) = (tmp_path / "runs").glob("anchors-*.zarr")
    made = CacheReader.open(cache).manifest.made
    assert made is not None
    assert made.source == "rollouts"
    # The settings name the anchors, so that another run records nothing.
    second = craft("train", *SMALL, *ENV, "--seed", 1, "--anchor-samples", 16, "--json")
    assert second.exit_code == 0, second.output
    assert "The teacher acted" not in second.stderr
    anchors = json.loads(second.stdout)["anchors"]
    assert (anchors["source"], anchors["rows"], anchors["reused"]) == ("environment", 16, True)


def test_fewer_frames_than_asked_for_are_all_taken(craft: Callable[..., Any]) -> None:
    rehearsed = craft("dryrun", *SMALL, "--old-env", "demo:red", "--old-env-episodes", 1, "--json")
    assert rehearsed.exit_code == 0, rehearsed.output
    found = json.loads(rehearsed.stdout)
    assert found["anchors"]["source"] == "environment"
    assert "up to 512 frames" in found["anchors"]["about"]
    assert "Drew 6 of the 6 frames" in rehearsed.stderr


def test_an_environment_of_the_new_task_is_refused(craft: Callable[..., Any]) -> None:
    refused = craft("train", *SMALL, "--old-env", "demo", "--old-env-episodes", 1)
    assert refused.exit_code == EXIT_USAGE
    assert "--old-env must not ask for the new task" in one_line(refused.stderr)
    assert "'reach the blue block' is an instruction of the new data" in one_line(refused.stderr)
    assert not list(Path("runs").glob("*.zarr*"))


def test_environments_that_do_not_exist_here(
    craft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "metaworld", None)
    missing = craft("train", *SMALL, "--old-env", "metaworld:reach-v3")
    assert missing.exit_code == 1
    assert "craftcli[metaworld]" in missing.stderr
    unknown = craft("train", *SMALL, "--old-env", "demo:pink")
    assert unknown.exit_code == EXIT_USAGE
    assert "the demo has red" in unknown.stderr


def test_labels_are_not_recorded(craft: Callable[..., Any]) -> None:
    refused = craft("train", *SMALL, *ENV, "--mode", "ewc")
    assert refused.exit_code == EXIT_USAGE
    assert "--mode ewc needs old data" in one_line(refused.stderr)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"old_env": " , "}, "--old-env names no environment"),
        ({"old_env_episodes": 3}, "--old-env-episodes needs --old-env"),
        ({"old_env": "demo:red", "old_tasks": "a.txt"}, "--old-tasks cannot be combined"),
        ({"old_env": "demo:red", "old_dataset": "demo"}, "--old-dataset cannot be combined"),
        ({"old_env": "demo:red", "anchors": "cache"}, "--old-env needs --anchors auto"),
        ({"old_env": "demo:red", "teacher": "live"}, "whose episodes are recorded once"),
    ],
)
def test_what_does_not_go_with_an_environment(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(CraftError, match=problem):
        TrainConfig(**settings)


def test_a_program_that_opens_such_a_run_must_record(tmp_path: Path) -> None:
    config = TrainConfig(old_env="demo:red", device="cpu", output=tmp_path / "run")
    with pytest.raises(RuntimeError, match="nothing was given that records"):
        open_run(config, {}, Processes())


def test_sweeps_record_too(tmp_path: Path) -> None:
    """As anchors that a run makes, and as a cache of the sweep's own, which failed before."""
    few = {"steps": 1, "batch_size": 4, "anchor_batch_size": 4, "device": "cpu"}
    document = {
        "train": few,
        "eval": {"episodes": 1, "env": ["demo:red", "demo:blue"]},
        "arm": [
            {"name": "run", "train": {"old_env": "demo:red", "old_env_episodes": 1}},
            {"name": "cache", "cache": {"env": "demo:red", "env_episodes": 2, "samples": 8}},
        ],
    }
    result = run_sweep(SweepSpec.from_dict(document, folder=tmp_path))
    assert result.failures == {}
    assert result.skipped == ()
