"""Lists of datasets: what can be read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from craftcli.config.cache import CacheConfig
from craftcli.config.dataset_list import parse_dataset, parse_datasets
from craftcli.config.settings import read_settings, resolve
from craftcli.config.train import TrainConfig
from craftcli.errors import CraftError


@pytest.mark.parametrize(
    ("text", "name", "weight"),
    [
        ("demo", "demo", None),
        ("demo:2", "demo", 2.0),
        ("me/pick:0.3", "me/pick", 0.3),
        ("/data/pick:1e-3", "/data/pick", 0.001),
        ("./pick:.5", "./pick", 0.5),
        ("C:\\data\\pick", "C:\\data\\pick", None),
        ("C:\\data\\pick:0.3", "C:\\data\\pick", 0.3),
        ("C:/data/pick", "C:/data/pick", None),
        ("a:b/pick", "a:b/pick", None),
    ],
)
def test_a_name_or_a_path_with_a_weight_or_without(
    text: str, name: str, weight: float | None
) -> None:
    found = parse_dataset(text)
    assert (found.name, found.weight) == (name, weight)


def test_a_folder_that_exists_is_a_folder(tmp_path: Path) -> None:
    odd = tmp_path / "pick:0.3"
    odd.mkdir()
    assert parse_dataset(str(odd)).weight is None
    assert parse_dataset(f"{odd}:0.5").weight == 0.5


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("a", "b:0"), "weight 0"),
        (("a", "b:-1"), "weight -1"),
        (("a", "b:nan"), "weight nan"),
        (("a", "b:inf"), "weight inf"),
        (("a", "b:"), "'' is no weight"),
        (("a", "b:half"), "'half' is no weight"),
        (("a", ":0.3"), "no dataset before the weight"),
        (("a", ""), "empty name"),
        (("a", "a"), "names a twice"),
        (("a:1", "a:2"), "names a twice"),
        ("a:0.3", "only beside another"),
    ],
)
def test_what_is_no_list_of_datasets_is_refused(given: str | tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_datasets(given)
    with pytest.raises(CraftError, match=reason):
        TrainConfig(policy="p", dataset=given)
    with pytest.raises(CraftError, match=reason):
        TrainConfig(old_dataset=given)


def test_one_dataset_is_the_same_setting_however_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "craft.toml"
    file.write_text('policy = "p"\ndataset = ["a"]\n')
    flags = {"policy": "p", "dataset": ["a"]}
    settings = [
        TrainConfig(policy="p", dataset="a"),
        TrainConfig(policy="p", dataset=("a",)),
        resolve(TrainConfig, flags=flags).settings,
        resolve(TrainConfig, flags={}, file=file).settings,
    ]
    assert all(found == settings[0] for found in settings)
    assert settings[0].to_json()["dataset"] == "a"


def test_several_come_from_options_from_a_file_and_from_a_saved_run(tmp_path: Path) -> None:
    file = tmp_path / "craft.toml"
    file.write_text('policy = "p"\ndataset = ["a", "b:0.3"]\n')
    by_file = resolve(TrainConfig, flags={"dataset": []}, file=file)
    assert by_file.origin["dataset"] == "file"
    by_flag = resolve(TrainConfig, flags={"policy": "p", "dataset": ["a", "b:0.3"]})
    assert by_file.settings == by_flag.settings
    saved = json.loads(json.dumps(by_flag.settings.to_json()))
    assert saved["dataset"] == ["a", "b:0.3"]
    again = TrainConfig(**read_settings(TrainConfig, saved, source="a run"))
    assert again == by_flag.settings
    assert [(d.name, d.weight) for d in again.datasets] == [("a", None), ("b", 0.3)]


def test_a_list_of_anything_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "craft.toml"
    for text in ('dataset = ["a", 1]', "dataset = []"):
        file.write_text(text)
        with pytest.raises(CraftError, match="not a list of type str"):
            resolve(TrainConfig, flags={}, file=file)


@pytest.mark.parametrize("name", ["dataset_root", "dataset_revision"])
def test_options_of_a_single_dataset_are_refused_with_several(name: str) -> None:
    given: dict[str, Any] = {"policy": "p", "dataset": ("a", "b"), name: "x"}
    with pytest.raises(CraftError, match="belongs to a single --dataset"):
        TrainConfig(**given)
    with pytest.raises(CraftError, match="belongs to a single --old-dataset"):
        TrainConfig(old_dataset=("a", "b"), old_dataset_root="x")


@pytest.mark.parametrize("name", ["episodes", "indices"])
def test_frames_by_number_belong_to_a_single_dataset(name: str) -> None:
    given: dict[str, Any] = {"policy": "p", "dataset": ("a", "b"), name: "0-3"}
    with pytest.raises(CraftError, match="belongs to a single --dataset"):
        CacheConfig(**given)


def test_the_demos_policy_takes_its_own_datasets_by_name() -> None:
    assert TrainConfig(dataset=("demo", "craft-demo/old:0.3")).is_demo
    with pytest.raises(CraftError, match="--policy is needed"):
        TrainConfig(dataset=("me/a", "me/b"))
