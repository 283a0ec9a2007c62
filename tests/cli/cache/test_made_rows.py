"""The commands on caches with made rows: what they say, and what they refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.act import STATE_ONLY
from tiny.world import write_dataset

from craftcli.cache.reading.reader import CacheReader
from craftcli.errors import EXIT_USAGE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

type Craft = Callable[..., Any]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny ACT on states, and a dataset for it."""
    folder = tmp_path_factory.mktemp("states")
    return STATE_ONLY.make(folder / "policy"), write_dataset(folder / "data")


def build(craft: Craft, states: tuple[Path, Path], *options: str) -> Any:
    policy, data = states
    return craft(
        *("cache", "build", "--policy", policy, "--dataset", data, "--device", "cpu"), *options
    )


def said(result: Any) -> str:
    return " ".join((result.stdout + result.stderr).split())


def test_inspect_says_what_is_real_and_what_is_made(
    craft: Craft, states: tuple[Path, Path], tmp_path: Path
) -> None:
    built = build(craft, states, "--samples", "4", "--augment", "3")
    assert built.exit_code == 0, built.output
    assert "Of these rows 12 are made: mixtures of frames (noise 0.3)." in said(built)
    shown = craft("cache", "inspect", "--verify", "--policy", states[0], "--plot", "a.png")
    assert shown.exit_code == 0, shown.output
    assert "4 rows, frames as they are" in said(shown)
    assert "12 rows (12 valid): mixtures of frames (noise 0.3)" in said(shown)
    assert "0 off" in said(shown)
    assert (tmp_path / "a.png").is_file()
    made = json.loads(craft("cache", "inspect", "--json").stdout)["made"]
    assert (made["rows"], made["real_rows"]) == (12, 4)
    assert [0 < distance["made"] < 5 for distance in made["distances"]] == [True, True]


def test_a_cache_from_statistics_is_verified_without_data(
    craft: Craft, states: tuple[Path, Path]
) -> None:
    policy, _ = states
    built = craft(
        *("cache", "build", "--policy", policy, "--from-statistics", "--samples", "6"),
        *("--device", "cpu"),
    )
    assert built.exit_code == 0, built.output
    assert "--moves-like NEW_DATA keeps these together" in said(built)
    shown = craft("cache", "inspect", "--verify", "--policy", policy)
    assert shown.exit_code == 0, shown.output
    assert "no real rows to compare with" in said(shown)
    assert "Teacher re-run over 6 rows: 0 off" in said(shown)


def test_states_of_several_tasks_come_from_their_statistics(
    craft: Craft, states: tuple[Path, Path], tmp_path: Path
) -> None:
    """One cache a task, from the file that LeRobot writes beside its data; then joined."""
    policy, data = states
    stats = json.loads((data / "meta/stats.json").read_text())
    for number, name in enumerate(("a", "b")):
        for feature in (key for key in stats if key.startswith("observation.")):
            size = len(stats[feature]["min"])
            # Nothing moves within a task, so that its states are all the same.
            stats[feature] |= {"min": [number] * size, "max": [number] * size}
        (tmp_path / f"{name}.json").write_text(json.dumps(stats))
        built = craft(
            *("cache", "build", "--policy", policy, "--from-statistics", "--samples", "6"),
            *("--statistics-file", f"{name}.json", "-o", f"{name}.zarr", "--device", "cpu"),
        )
        assert built.exit_code == 0, built.output
    joined = craft("cache", "merge", "a.zarr", "b.zarr", "-o", "c.zarr", "--json")
    assert joined.exit_code == 0, joined.output
    assert json.loads(joined.stdout)["rows"] == 12
    drawn = CacheReader.open(tmp_path / "c.zarr").read_all("inputs/observation.state")
    assert len(np.unique(drawn[:6], axis=0)) == len(np.unique(drawn[6:], axis=0)) == 1
    assert (drawn[0] < drawn[6]).all()
    for option, value in (("--statistics-file", "a.json"), ("--moves-like", data)):
        alone = craft("cache", "build", "--policy", policy, option, value)
        assert alone.exit_code == EXIT_USAGE
        assert f"{option} needs --from-statistics" in said(alone)


def test_a_dataset_shows_how_drawn_states_move(
    craft: Craft, states: tuple[Path, Path], tmp_path: Path
) -> None:
    policy, data = states
    drawing = ("cache", "build", "--policy", policy, "--from-statistics", "--samples", "6")
    built = craft(*drawing, "--moves-like", data, "--device", "cpu")
    assert built.exit_code == 0, built.output
    assert "drawn apart" not in said(built)
    assert craft("cache", "inspect", "--verify", "--policy", policy).exit_code == 0
    missing = craft(*drawing, "--moves-like", tmp_path / "nowhere", "-o", "b.zarr")
    assert missing.exit_code == 1, missing.output
    assert "Fix: give --moves-like a folder that holds meta/ and data/" in said(missing)


def test_made_rows_are_joined(craft: Craft, states: tuple[Path, Path]) -> None:
    for name, seed in (("a.zarr", "0"), ("b.zarr", "1")):
        built = build(
            craft, states, "--indices", "0-3", "--augment", "2", "--seed", seed, "-o", name
        )
        assert built.exit_code == 0, built.output
    joined = craft("cache", "merge", "a.zarr", "b.zarr", "-o", "c.zarr", "--json")
    assert joined.exit_code == 0, joined.output
    found = json.loads(joined.stdout)
    assert (found["rows"], found["duplicates"]) == (4 + 8 + 8, 4)
    assert craft("cache", "inspect", "c.zarr", "--verify").exit_code == 0


def test_one_frame_gets_noise_alone_and_is_told_so(craft: Craft, states: tuple[Path, Path]) -> None:
    built = build(craft, states, "--samples", "1", "--augment", "3")
    assert built.exit_code == 0, built.output
    assert "One frame has no partner to be mixed with" in said(built)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--augment-fixed", "observation.state"), "--augment-fixed needs --augment"),
        (("--augment", "2", "--augment-fixed", "1,2"), "where a name is expected"),
        (("--augment", "2", "--augment-fixed", "observation.sate"), "its vectors are"),
        (("--augment", "2", "--augment-fixed", "observation.state:9"), "has 4 numbers"),
        (
            (
                *("--augment", "2", "--augment-fixed"),
                "observation.state,observation.environment_state",
            ),
            "--augment does not work for this policy",
        ),
        (("--augment", "2", "--actions", "data"), "made anchors have no labels"),
    ],
)
def test_what_cannot_be_varied_is_refused(
    craft: Craft, states: tuple[Path, Path], tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    refused = build(craft, states, "--samples", "4", *options)
    assert refused.exit_code == EXIT_USAGE, refused.output
    assert message in said(refused)
    assert not (tmp_path / "anchors.zarr").exists()


def test_the_benchmark_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import made_rows

    measured = made_rows.measure(tmp_path, samples=4, batch_size=2, rounds=2)
    assert measured.ratio(made_rows.MADE, made_rows.PLAIN) > 0
