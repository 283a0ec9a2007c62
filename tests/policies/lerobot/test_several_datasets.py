"""Several datasets as one: what LeRobot's own merging of them would give, without copying."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.datasets import EpisodeAwareSampler
from lerobot.datasets.aggregate import aggregate_datasets
from tiny.act import policy as tiny_act
from tiny.robots import spread, write_robot_data
from tiny.world import CAMERAS, save, write_dataset

from craftcli.choices import Stats
from craftcli.config.dataset_list import parse_datasets
from craftcli.distributed import Processes
from craftcli.errors import CraftError
from craftcli.policies.identity import common_frames
from craftcli.policies.lerobot.apart_statistics import for_dataset, task_preprocessor
from craftcli.policies.lerobot.batches import TaskBatches, read_item, read_rows, usable_frames
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset
from craftcli.policies.lerobot.identity import dataset_identity, identities, part_identities
from craftcli.policies.lerobot.movement import read_vector
from craftcli.policies.lerobot.several_datasets import (
    SeveralDatasets,
    describe_frame_rates,
    require_same_features,
)
from craftcli.policies.lerobot.task_processors import fit_to
from craftcli.sources import DataSource, open_sources

VECTORS = ("observation.state", "action")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    found = {name: write_dataset(folder / name, seed=n) for n, name in enumerate("ab")}
    merged = folder / "merged"
    aggregate_datasets(
        repo_ids=["a", "b"],
        aggr_repo_id="merged",
        roots=[found["a"], found["b"]],
        aggr_root=merged,
    )
    return {**found, "merged": merged}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = save(tmp_path_factory.mktemp("act") / "policy", tiny_act(cameras=1))
    return load_checkpoint(str(folder), device="cpu")


def opened(policy: Checkpoint, *names: str | Path) -> Any:
    named = parse_datasets(tuple(map(str, names)))
    sources = [DataSource(repo_id=entry.name) for entry in named]
    return open_sources(sources, named, policy)


@pytest.fixture(scope="module")
def both(policy: Checkpoint, folders: dict[str, Path]) -> SeveralDatasets:
    found: SeveralDatasets = opened(policy, folders["a"], folders["b"])
    return found


@pytest.fixture(scope="module")
def merged(policy: Checkpoint, folders: dict[str, Path]) -> Any:
    return opened(policy, folders["merged"])


def test_items_and_metadata_are_those_of_the_merged_dataset(
    both: SeveralDatasets, merged: Any
) -> None:
    assert len(both) == len(merged) == 32
    for row in range(len(both)):
        ours, theirs = both[row], merged[row]
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            same = torch.equal(ours[key], value) if torch.is_tensor(value) else ours[key] == value
            assert same, (row, key)
    assert both.meta.total_episodes == merged.meta.total_episodes
    assert both.meta.camera_keys == merged.meta.camera_keys
    for name in ("episode_index", "task_index", "index"):
        ours, theirs = (d.hf_dataset.data.column(name).to_numpy() for d in (both, merged))
        assert np.array_equal(ours, theirs)
    actions = [d.hf_dataset.data.column("action").to_pylist() for d in (both, merged)]
    assert actions[0] == actions[1]
    for name in VECTORS:
        for statistic in ("mean", "std", "min", "max", "q01", "q99"):
            np.testing.assert_allclose(
                both.meta.stats[name][statistic], merged.meta.stats[name][statistic], rtol=1e-6
            )


def test_without_weights_the_batches_are_those_of_the_merged_dataset(
    both: SeveralDatasets, merged: Any
) -> None:
    ours, theirs = (
        itertools.islice(TaskBatches(d, batch_size=5, seed=3, workers=0, drop_last_frames=2), 12)
        for d in (both, merged)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one["index"].tolist() == other["index"].tolist()
        assert torch.equal(one["action"], other["action"])
        assert torch.equal(one[CAMERAS[0]], other[CAMERAS[0]])


def test_last_frames_are_left_out_of_each_dataset_as_lerobot_does(both: SeveralDatasets) -> None:
    for part in both.parts:
        episodes = part.meta.episodes
        edges = episodes["dataset_from_index"], episodes["dataset_to_index"]
        theirs = EpisodeAwareSampler(*edges, drop_n_last_frames=3)
        assert usable_frames(part, 3).tolist() == theirs.indices
    with pytest.raises(CraftError, match="no frame is left"):
        usable_frames(both.parts[0], 8)


@pytest.mark.parametrize("some", [None, [1, 2, 9, 20]])
def test_vectors_are_read_as_from_the_merged_dataset(
    both: SeveralDatasets, merged: Any, some: list[int] | None
) -> None:
    ours, theirs = (read_vector(data, "observation.state", some) for data in (both, merged))
    assert ours is not None
    assert theirs is not None
    for mine, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, wanted)


def rows(batches: TaskBatches, count: int) -> list[list[int]]:
    return [batch["index"].tolist() for batch in itertools.islice(batches, count)]


def test_weights_give_shares_resume_anywhere_and_are_divided_among_processes(
    policy: Checkpoint, folders: dict[str, Path]
) -> None:
    data = opened(policy, f"{folders['a']}:3", folders["b"])
    assert data.shares == (0.75, 0.25)
    batches = TaskBatches(data, batch_size=4, seed=0, workers=0, drop_last_frames=2)
    walk = iter(batches)
    whole = [next(walk)["index"].tolist() for _ in range(5)]
    position = batches.position
    whole += [next(walk)["index"].tolist() for _ in range(7)]
    first = [row for batch in whole[:6] for row in batch]
    assert sum(row < 16 for row in first) == 18  # of an epoch with 24 draws
    assert not {row % 8 for row in first} & {6, 7}
    resumed = TaskBatches(
        data, batch_size=4, seed=0, workers=0, drop_last_frames=2, position=position
    )
    assert rows(resumed, 7) == whole[5:]
    shares = [
        rows(
            TaskBatches(
                data,
                batch_size=2,
                seed=0,
                workers=0,
                drop_last_frames=2,
                processes=Processes(rank=rank, world=2),
            ),
            12,
        )
        for rank in range(2)
    ]
    together = [[*one, *other] for one, other in zip(*shares, strict=True)]
    assert together == whole


def test_worker_processes_read_what_one_process_reads(
    policy: Checkpoint, folders: dict[str, Path]
) -> None:
    data = opened(policy, f"{folders['a']}:3", folders["b"])
    alone, workers = (
        [
            (batch["index"].tolist(), batch["action"])
            for batch in itertools.islice(TaskBatches(data, batch_size=4, seed=0, workers=count), 3)
        ]
        for count in (0, 1)
    )
    for one, other in zip(alone, workers, strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])


def test_each_dataset_has_an_identity_of_its_own(both: SeveralDatasets) -> None:
    whole = dataset_identity(both, [3, 20])
    parts = part_identities(both, [3, 20])
    assert parts is not None
    assert whole.fingerprint.startswith("several:")
    assert (whole.repo_id, whole.frames, whole.root) == ("a+b", 32, None)
    assert parts == tuple(
        dataset_identity(part, [row]) for part, row in zip(both.parts, (3, 4), strict=True)
    )
    assert part_identities(both.parts[0], [3]) is None
    (common,) = common_frames(identities(both), identities(both.parts[1]))
    assert (common.old, common.shift) == (range(16, 32), -16)
    assert common.in_second(np.array([3, 20])).tolist() == [4]


def test_statistics_are_joined_and_that_is_said(
    policy: Checkpoint, both: SeveralDatasets, merged: Any
) -> None:
    ours, theirs = (fit_to(policy, d, Stats.DATASET) for d in (both, merged))
    assert ours.stored is not None
    assert theirs.stored is not None
    for name in VECTORS:
        assert ours.stored[name]["mean"] == pytest.approx(theirs.stored[name]["mean"], abs=1e-6)
    assert ours.choice.sentences()[-1].startswith("a and b share these statistics")
    assert not any("share" in sentence for sentence in theirs.choice.sentences())


def test_statistics_kept_apart_normalise_each_row_with_its_own(
    folders: dict[str, Path], policy: Checkpoint
) -> None:
    data = opened(policy, folders["a"], f"{folders['b']}:3")
    fitted = fit_to(policy, data, Stats.DATASET, is_task=True)
    student = fitted.policy
    assert fitted.choice.sentences()[-1].startswith("a and b are normalised apart")
    rows = [20, 3, 31, 0, 15, 16]
    mixed = task_preprocessor(student, data)(read_rows(data, rows))
    for place, row in enumerate(rows):
        number, own_row = data.locate(row)
        part = data.parts[number]
        alone = fit_to(policy, part, Stats.DATASET).policy
        expected = alone.preprocess(read_rows(part, [own_row]))
        by_number = for_dataset(student, number).preprocess(read_rows(part, [own_row]))
        for name in (*VECTORS, CAMERAS[0]):
            assert torch.equal(mixed[name][place], expected[name][0]), (row, name)
            assert torch.equal(by_number[name], expected[name])
    first, second = (pair.preprocess(read_rows(data, [0])) for pair in student.apart)
    assert not torch.equal(first["action"], second["action"])
    assert torch.equal(student.preprocess(read_rows(data, [0]))["action"], first["action"])
    assert student.as_teacher().apart == ()


def test_one_dataset_and_other_statistics_are_not_kept_apart(
    policy: Checkpoint, both: SeveralDatasets, merged: Any
) -> None:
    assert fit_to(policy, both, Stats.WIDEN, is_task=True).policy.apart == ()
    single = fit_to(policy, merged, Stats.DATASET, is_task=True).policy
    assert single.apart == ()
    assert task_preprocessor(single, merged) is single.preprocess


def test_the_same_data_under_two_names_is_refused(
    policy: Checkpoint, folders: dict[str, Path], tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(folders["a"])
    with pytest.raises(CraftError, match="named twice"):
        opened(policy, folders["a"], link)


def test_an_unknown_dataset_is_named(policy: Checkpoint, folders: dict[str, Path]) -> None:
    with pytest.raises(CraftError, match="'nobody/nothing'"):
        opened(policy, folders["a"], "nobody/nothing")


def changed_info(source: Path, target: Path, change: Any) -> Path:
    """A copy of a dataset with another info file."""
    shutil.copytree(source, target)
    info = json.loads((target / "meta/info.json").read_text())
    change(info)
    (target / "meta/info.json").write_text(json.dumps(info))
    return target


def test_different_frame_rates_are_said(
    policy: Checkpoint, folders: dict[str, Path], tmp_path: Path
) -> None:
    # The timestamps would not fit, but nothing is read here.
    slow = changed_info(folders["b"], tmp_path / "slow", lambda info: info.update(fps=5))
    warning = describe_frame_rates(opened(policy, folders["a"], slow))
    assert warning is not None
    assert "a 10, slow 5 frames a second" in warning
    assert describe_frame_rates(opened(policy, folders["a"])) is None


@pytest.fixture(scope="module")
def robots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Datasets that differ in a camera, in the size of images, or in the size of a vector."""
    folder = tmp_path_factory.mktemp("robots")

    def write(name: str, *, size: int = 4, px: int = 32, cameras: tuple[str, ...]) -> Path:
        vectors = {n: spread(6, size, seed=len(name)) for n in VECTORS}
        return write_robot_data(folder / name, vectors, cameras=cameras, px=px)

    top, hand = "observation.images.top", "observation.images.hand"
    return {
        "plain": write("plain", cameras=(top, hand)),
        "other": write("other", cameras=(top, hand)),
        "blind": write("blind", cameras=(top,)),
        "large": write("large", px=48, cameras=(top, hand)),
        "renamed": write("renamed", cameras=("observation.images.cam", hand)),
        "bigger": write("bigger", size=6, cameras=(top, hand)),
    }


class Config:
    """What `open_dataset` and the checks read of a policy's configuration."""

    def __init__(self) -> None:
        self.image_features = {
            key: PolicyFeature(type=FeatureType.VISUAL, shape=(3, 32, 32))
            for key in ("observation.images.top", "observation.images.hand")
        }
        self.input_features = {
            **self.image_features,
            "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(4,)),
        }
        self.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=(4,))}
        self.observation_delta_indices = None
        self.action_delta_indices = [0, 1]
        self.reward_delta_indices = None


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ("blind", r"observation.images.hand is \(32, 32, 3\) in plain and absent in blind"),
        ("large", r"observation.images.top is \(32, 32, 3\) in plain and \(48, 48, 3\) in large"),
        ("renamed", "observation.images.top is .* and absent in renamed"),
        ("bigger", r"action is \(4,\) in plain and \(6,\) in bigger"),
    ],
)
def test_datasets_that_differ_are_refused_by_the_name_of_the_feature(
    robots: dict[str, Path], other: str, difference: str
) -> None:
    config = Config()
    parts = [
        open_dataset(str(robots[name]), root=None, policy_config=config, takes_size=lambda *_: True)
        for name in ("plain", other)
    ]
    with pytest.raises(CraftError, match=difference):
        require_same_features(parts, config, {})


def test_a_rename_serves_the_datasets_that_need_it(robots: dict[str, Path]) -> None:
    config, renames = Config(), {"observation.images.cam": "observation.images.top"}
    parts = [
        open_dataset(str(robots[name]), root=None, policy_config=config, renames=renames)
        for name in ("plain", "renamed")
    ]
    require_same_features(parts, config, renames)
    both = SeveralDatasets(parts, weights=[None, None], renames=renames)
    assert "observation.images.cam" in both.meta.camera_keys
    for row, (part, name) in ((1, (parts[0], "top")), (7, (parts[1], "cam"))):
        own = read_item(part, 1)[f"observation.images.{name}"]
        assert torch.equal(both[row]["observation.images.cam"], own)
        assert "observation.images.top" not in both[row]
    assert both.meta.stats["observation.images.cam"]["count"] == 12
