"""Paths in the settings of a run: recorded as absolute ones, found again when the run moves."""

from pathlib import Path
from typing import Any

import pytest

from craftcli.config.run_paths import absolute, find_paths, record_path, record_paths, same_path
from craftcli.config.train import TrainConfig
from craftcli.locations import RemotePath


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a policy, a dataset and a cache."""
    place = tmp_path / "work"
    for name in ("policy", "data/new", "anchors.zarr", "runs/a"):
        (place / name).mkdir(parents=True)
    monkeypatch.chdir(place)
    return place


def recorded(work: Path, **settings: Any) -> dict[str, Any]:
    config = TrainConfig(**{"policy": "policy", "dataset": "data/new", **settings})
    return record_paths(config, Path("runs/a")).to_json()


def test_local_paths_are_recorded_absolute_and_all_else_as_it_is(work: Path) -> None:
    saved = recorded(work, cache=Path("anchors.zarr"), old_dataset="me/old", anchor_root="moved")
    assert saved["policy"] == str(work / "policy")
    assert saved["dataset"] == str(work / "data/new")
    assert saved["cache"] == str(work / "anchors.zarr")
    assert saved["anchor_root"] == str(work / "moved")
    assert saved["output"] == str(work / "runs/a")
    assert saved["old_dataset"] == "me/old"
    assert record_path("cache", RemotePath("s3://bucket/a.zarr")) == RemotePath(
        "s3://bucket/a.zarr"
    )
    assert record_path("policy", "demo") == "demo"
    assert record_path("steps", 4) == 4
    # A folder with the name of the demo is not the demo.
    (work / "demo").mkdir()
    assert record_path("dataset", "demo") == "demo"


def test_a_path_is_found_where_it_was_recorded_from_any_working_directory(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = recorded(work, cache=Path("anchors.zarr"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "anchors.zarr").mkdir()
    assert find_paths(saved, Path("work/runs/a")) == saved


def test_what_moved_with_the_run_is_found_as_seen_from_it(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = recorded(work, cache=Path("anchors.zarr"), old_dataset="me/old")
    monkeypatch.chdir(tmp_path)
    (work / "policy").rmdir()
    moved = work.rename(tmp_path / "elsewhere")
    found = find_paths(saved, Path("elsewhere/runs/a"))
    assert found["cache"] == str(moved / "anchors.zarr")
    assert found["dataset"] == str(moved / "data/new")
    # What is nowhere stays as recorded, for the error that names it.
    assert found["policy"] == str(work / "policy")
    assert found["old_dataset"] == "me/old"


@pytest.mark.parametrize("output", [None, "runs/a"])
def test_relative_paths_of_earlier_versions_are_seen_from_the_run_first(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str | None
) -> None:
    saved = {"policy": "policy", "cache": "anchors.zarr", "dataset": "me/new", "output": output}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "anchors.zarr").mkdir()  # another cache with the same name
    found = find_paths(saved, work / "runs/a")
    assert found["cache"] == str(work / "anchors.zarr")
    assert found["policy"] == str(work / "policy")
    assert found["dataset"] == "me/new"


def test_locations_in_object_stores_and_the_demo_stay(work: Path) -> None:
    saved = {"policy": "demo", "dataset": "demo", "cache": "s3://bucket/a.zarr", "output": None}
    assert find_paths(saved, work / "runs/a") == saved


def test_records_of_the_same_path_agree_before_and_after_a_move(work: Path, tmp_path: Path) -> None:
    before = recorded(work, cache=Path("anchors.zarr"))
    older = {"cache": "anchors.zarr", "policy": "other", "output": None}
    moved = work.rename(tmp_path / "elsewhere")
    run = moved / "runs/a"
    after = {**find_paths(before, run), "output": str(run)}
    assert after["cache"] != before["cache"]
    assert same_path("cache", run, before, after)
    assert same_path("cache", run, older, after)
    assert not same_path("policy", run, older, after)
    assert not same_path("cache", run, before, {**after, "cache": str(tmp_path / "b.zarr")})


def test_links_stay_in_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk/data").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/data")
    monkeypatch.chdir(tmp_path)
    assert absolute("link") == tmp_path / "link"
    # `..` of a link is the folder above its target.
    assert absolute("link/..") == tmp_path / "disk"


def test_lists_of_datasets_are_recorded_and_found_with_their_weights(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for name in ("a", "b"):
        (before / name).mkdir(parents=True)
    given = (str(before / "a"), f"{before / 'b'}:0.3", "me/on_hub:2")
    config = record_paths(TrainConfig(policy="me/policy", dataset=given), before / "runs/one")
    assert config.dataset == given
    saved = {"dataset": list(given), "output": str(before / "runs/one")}
    before.rename(after)
    run = after / "runs/one"
    moved = [str(after / "a"), f"{after / 'b'}:0.3", "me/on_hub:2"]
    assert find_paths(saved, run)["dataset"] == moved
    now = {"dataset": moved, "output": str(run)}
    assert same_path("dataset", run, saved, now)
    assert not same_path("dataset", run, saved, {**now, "dataset": moved[:2]})
    other = [moved[0], f"{after / 'b'}:0.5", moved[2]]
    assert not same_path("dataset", run, saved, {**now, "dataset": other})
