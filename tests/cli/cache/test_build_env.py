"""`craft cache build --env` as a user meets it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from craftcli.cache.format import MadeRows
from craftcli.cache.reading.reader import CacheReader
from craftcli.config.cache import CacheConfig
from craftcli.errors import CraftError

ENV = ("cache", "build", "--env", "demo:red,demo:blue", "--env-episodes", "2", "--samples", "16")


@pytest.mark.slow
def test_anchors_of_the_teachers_own_episodes(craft: Callable[..., Any]) -> None:
    result = craft(*ENV, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"] == 16
    made = CacheReader.open(Path("anchors.zarr")).manifest.made
    settings = {"environments": "demo:red,demo:blue", "episodes": "4"}
    assert made == MadeRows(source="rollouts", rows=16, settings=settings)
    # The demo's teacher was never taught blue.
    assert "never succeeded in demo:blue" in result.stderr
    trained = craft("train", "--steps", "1", "--output", "run")
    assert trained.exit_code == 0, trained.output
    assert "anchor cache loaded: 16 rows" in trained.output


def test_too_few_frames_say_how_many_there_can_be(craft: Callable[..., Any]) -> None:
    result = craft("cache", "build", "--env", "demo:red", "--env-episodes", "1")
    assert result.exit_code == 2
    assert "too few frames for 512 anchors" in result.stderr
    assert "raise --env-episodes, or lower --samples" in result.stderr


def test_a_missing_simulator_names_the_extra(
    craft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "metaworld", None)
    result = craft("cache", "build", "--env", "metaworld:reach-v3")
    assert result.exit_code == 1
    assert "craftcli[metaworld]" in result.stderr


def test_an_unknown_environment_is_a_usage_error(craft: Callable[..., Any]) -> None:
    result = craft("cache", "build", "--env", "demo:pink")
    assert result.exit_code == 2
    assert "the demo has red" in result.stderr


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"env": " , "}, "--env names no environment"),
        ({"augment": 3}, "--augment cannot be combined with --env"),
        ({"from_statistics": True}, "--from-statistics cannot be combined with --env"),
        ({"episodes": "0-3"}, "--episodes cannot be combined with --env"),
        ({"draws": 2}, "--draws cannot be combined with --env"),
        ({"sampling": "per_task"}, "--sampling cannot be combined with --env"),
        ({"actions": "data"}, "recorded frames have no labels"),
    ],
)
def test_what_does_not_go_with_an_environment(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(CraftError, match=problem):
        CacheConfig(**{"env": "demo:red", **settings})


def test_a_policy_needs_no_dataset_with_an_environment() -> None:
    for source in ({"env": "pusht"}, {"from_statistics": True}):
        config = CacheConfig(policy="some/policy", **source)
        assert not config.needs_dataset
        assert config.not_chosen({"policy"}) == []
    (problem,) = CacheConfig(policy="some/policy").not_chosen({"policy"})
    assert "--dataset is needed" in problem
