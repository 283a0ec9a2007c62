"""Every form of dataset that LeRobot 0.6 writes opens; other versions are refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lerobot.annotations.steerable_pipeline.writer import speech_atom
from lerobot.datasets.language import (
    LANGUAGE_EVENTS,
    LANGUAGE_PERSISTENT,
    language_feature_info,
)
from tiny import smolvla
from tiny.world import CAMERAS, write_dataset

from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Kind
from craftcli.config.train import TrainConfig
from craftcli.engine.retention.opening import open_anchors
from craftcli.engine.retention.retention import open_retention
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.datasets import check_version, open_dataset

type Change = Callable[[dict[str, Any]], object]
SMALL = ("--device", "cpu", "--batch-size", "2")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("images") / "data")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smolvla.make(tmp_path_factory.mktemp("policies") / "smolvla")


def edit_info(root: Path, change: Change) -> Path:
    file = root / "meta/info.json"
    info = json.loads(file.read_text())
    change(info)
    file.write_text(json.dumps(info))
    return root


def of_version(images: Path, root: Path, version: str) -> Path:
    shutil.copytree(images, root)
    return edit_info(root, lambda info: info.update(codebase_version=version))


def annotated(images: Path, root: Path) -> Path:
    """The dataset with the two columns of LeRobot's text annotations."""
    shutil.copytree(images, root)
    (file,) = root.glob("data/**/*.parquet")
    table = pq.read_table(file)
    empty = {"camera": None, "tool_calls": None}
    plan = {"role": "assistant", "content": "push it", "style": "plan", "timestamp": 0.0, **empty}
    user_event = {"role": "user", "content": "careful", "style": "interjection", **empty}
    spoken = speech_atom(0.0, "well done")
    del spoken["timestamp"]  # an event lies in the row of its time
    events = [[user_event], [spoken], [], []] * (len(table) // 4)
    table = table.append_column(LANGUAGE_PERSISTENT, pa.array([[plan]] * len(table)))
    table = table.append_column(LANGUAGE_EVENTS, pa.array(events))
    # The metadata of the datasets library describes the columns before this change.
    pq.write_table(table.replace_schema_metadata(None), file)
    return edit_info(root, lambda info: info["features"].update(language_feature_info()))


FORMS: dict[str, Callable[[Path, Path], Path]] = {
    "images": lambda images, _: images,
    "videos": lambda _, root: write_dataset(root, videos=True),
    "depth": lambda _, root: write_dataset(root, depth=True),
    "depth-videos": lambda _, root: write_dataset(root, depth=True, videos=True),
    "words": annotated,
    "v3.1": lambda images, root: of_version(images, root, "v3.1"),
}


def build(craft: Callable[..., Any], policy: Path, data: Path, *more: str) -> Any:
    where = ("--policy", policy, "--dataset", data, *SMALL)
    return craft("cache", "build", *where, "--samples", "6", *more)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_dataset_is_built_from_trained_on_and_read_again(
    form: str, images: Path, policy: Path, tmp_path: Path, craft: Callable[..., Any]
) -> None:
    data = FORMS[form](images, tmp_path / "data")
    built = build(craft, policy, data)
    assert built.exit_code == 0, built.output
    assert CacheReader.open(Path("anchors.zarr")).manifest.images == "reference"
    trained = craft(
        *("train", "--policy", policy, "--dataset", data, *SMALL, "--anchor-batch-size", "3"),
        *("--mode", "hidden+action", "--steps", "2", "--lr", "1e-3", "--output", "run"),
    )
    assert trained.exit_code == 0, trained.output
    # The images of the anchors, read again, are to the bit those that the teacher saw.
    drift = re.search(r"L_ret at the teacher's weights: (\S+) \(0 to", trained.stdout)
    assert drift
    assert float(drift[1]) <= 1e-9
    found = craft("eval", "run", *SMALL, "--samples", "4", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["left_out"] == []


def test_frames_of_a_video_are_the_same_embedded_and_read_again(
    policy: Path, tmp_path: Path, craft: Callable[..., Any]
) -> None:
    data = write_dataset(tmp_path / "data", videos=True)
    assert list(data.glob("videos/**/*.mp4"))
    for images in ("embed", "reference"):
        assert build(craft, policy, data, "--images", images, "-o", images).exit_code == 0
    teacher = load_checkpoint(str(policy), device="cpu")
    config = TrainConfig(anchor_batch_size=6, mode="hidden", device="cpu")
    opened: list[Any] = [
        open_retention(config, teacher, Path(cache)).anchors for cache in ("embed", "reference")
    ]
    kept, read = (anchors.batch(0, torch.device("cpu")).inputs for anchors in opened)
    assert kept.keys() == read.keys()
    assert {*CAMERAS} <= kept.keys()
    for key, value in kept.items():
        assert torch.equal(value, read[key]), key


@pytest.mark.parametrize("camera", CAMERAS)
def test_replaced_frames_of_a_video_are_refused_as_they_are_read(
    policy: Path, tmp_path: Path, craft: Callable[..., Any], camera: str
) -> None:
    """A fingerprint of the dataset cannot tell: it covers no pixels of videos."""
    data, other = tmp_path / "data", tmp_path / "other"
    write_dataset(data, videos=True)
    write_dataset(other, videos=True, seed=6)
    assert build(craft, policy, data, "--images", "reference", "-o", "a.zarr").exit_code == 0
    teacher = load_checkpoint(str(policy), device="cpu")
    reader = CacheReader.open(Path("a.zarr"))
    frames, row = reader.read_all("index/dataset_index"), np.array([4])
    before = open_anchors(reader, teacher, kinds=[Kind.HIDDEN])
    before.anchors.read(row, torch.device("cpu"))
    (video,) = data.glob(f"videos/{camera}/**/*.mp4")
    shutil.copy(other / video.relative_to(data), video)
    # The same dataset, as far as its identity goes: it opens, and the frame itself is refused.
    opened = open_anchors(reader, teacher, kinds=[Kind.HIDDEN])
    with pytest.raises(CraftError, match=f"row 4 .*frame {frames[4]}, .*images"):
        opened.anchors.read(row, torch.device("cpu"))
    for command in ("train", "dryrun"):
        run = (command, "--policy", policy, "--dataset", data, "--cache", "a.zarr", "--steps", "2")
        refused = craft(*run, "--anchor-batch-size", "2", *SMALL)
        assert refused.exit_code == EXIT_CHECK_FAILED, refused.output
        shown = " ".join(refused.output.split())
        assert re.search(r"has changed since the cache \S*a\.zarr was built", shown)


@pytest.mark.parametrize(
    ("version", "fix"),
    [
        ("v2.1", "convert_dataset_v21_to_v30 --repo-id=data --root="),
        ("v2.0", "to v2.1 first"),
        ("v4.0", "update LeRobot"),
        ("four", "record or download it again"),
    ],
)
def test_another_format_is_refused_with_the_way_out(
    version: str, fix: str, images: Path, policy: Path, tmp_path: Path, craft: Callable[..., Any]
) -> None:
    """LeRobot shows a page for v2.1, nothing of use for v2.0, and reads v4.0 as if it were v3."""
    data = of_version(images, tmp_path / "data", version)
    train = ("train", "--mode", "none", "--policy", policy, "--dataset", data, *SMALL)
    for refused in (build(craft, policy, data), craft(*train)):
        assert refused.exit_code == 1
        message = " ".join(refused.stderr.split())
        assert re.search(r"Error: The dataset \S+ (is in another format|cannot be read)\.", message)
        assert version.removeprefix("v") in message
        assert fix in message
        assert "Traceback" not in refused.output


def test_a_real_v21_layout_is_refused_before_its_files_are_missed(
    images: Path, policy: Path, tmp_path: Path
) -> None:
    """It has other files in meta/, and fields that LeRobot 0.6 does not know."""
    data = of_version(images, tmp_path / "data", "v2.1")
    edit_info(data, lambda info: info.update(total_videos=0, total_chunks=1))
    shutil.rmtree(data / "meta/episodes")
    (data / "meta/tasks.parquet").unlink()
    (data / "meta/tasks.jsonl").write_text('{"task_index": 0, "task": "push"}\n')
    config = load_checkpoint(str(policy), device="cpu").policy.config
    with pytest.raises(CraftError, match=r"format v2\.1, and the LeRobot installed here reads v3"):
        open_dataset("me/data", root=str(data), policy_config=config)


def test_a_dataset_of_the_hub_is_named_when_it_is_to_be_converted() -> None:
    with pytest.raises(CraftError, match=r"--repo-id=me/old\."):
        check_version("me/old", "v2.1")
