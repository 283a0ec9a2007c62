"""Several datasets from the command line: dryrun, train, resume, inspect, eval, compare, caches."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from craftcli.cache.reading.reader import CacheReader
from craftcli.cli.app import app
from craftcli.demo.datasets import OLD, demo_root
from craftcli.engine.checkpoint_manifest import CheckpointManifest
from craftcli.engine.summary_file import RunSummary
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE
from craftcli.evaluation.subject import open_subject
from craftcli.policies.lerobot.identity import processor_digest

MIXTURE = ("--dataset", "demo", "--dataset", "craft-demo/old:0.25")
SIZES = ("--steps", 4, "--save-every", 2, "--batch-size", 4, "--anchor-batch-size", 4)
SHORT = (*SIZES, "--log-every", 1, "--device", "cpu")
WEIGHTS = "checkpoints/last/pretrained_model/model.safetensors"
BUILD = ("cache", "build", "--dataset", "demo:3", "--dataset", "craft-demo/new", "--samples", 24)


def run_craft(*arguments: Any) -> Any:
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def anchors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of two datasets, three quarters of it old, by reference."""
    cache = tmp_path_factory.mktemp("anchors") / "a.zarr"
    run_craft(*BUILD, "--output", cache, "--device", "cpu")
    return cache


@pytest.fixture(scope="module")
def finished(anchors: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two datasets, held by anchors of two datasets."""
    run = tmp_path_factory.mktemp("finished") / "run"
    shown = run_craft("train", *MIXTURE, *SHORT, "--cache", anchors, "-o", run).stdout
    assert "craft-demo/new (80.0% of the samples, 480 frames)" in shown
    assert "craft-demo/old (20.0% of the samples, 720 frames)" in shown
    return run


def test_anchors_come_by_their_weights_and_are_counted_through(anchors: Path) -> None:
    reader = CacheReader.open(anchors)
    frames = reader.read_all("index/dataset_index")
    assert [int((frames < 720).sum()), int((frames >= 720).sum())] == [18, 6]
    datasets = reader.manifest.datasets
    assert datasets is not None
    assert [(d.repo_id, d.frames) for d in datasets] == [
        ("craft-demo/old", 720),
        ("craft-demo/new", 480),
    ]
    assert all(d.root and d.fingerprint and d.selection_digest for d in datasets)
    episodes = reader.read_all("index/episode")
    assert np.array_equal(frames // 4, episodes)
    assert reader.manifest.to_json()["datasets"][0]["repo_id"] == "craft-demo/old"


def test_inspect_shows_rows_by_dataset_and_verifies_both(
    craft: Callable[..., Any], anchors: Path
) -> None:
    named = ("--dataset", "demo", "--dataset", "craft-demo/new", "--policy", "demo")
    result = craft("cache", "inspect", anchors, "--verify", *named, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["datasets"].values()) == [18, 6]
    assert "Rows by dataset" in result.stderr
    swapped = ("--dataset", "craft-demo/new", "--dataset", "craft-demo/old")
    result = craft("cache", "inspect", anchors, *swapped)
    assert result.exit_code == EXIT_CHECK_FAILED
    assert "another policy or dataset" in result.stderr


def test_an_interrupted_build_ends_in_the_same_bytes(
    teacher: Any, anchors: Path, tmp_path: Path
) -> None:
    from made.files import tree

    from craftcli.cache.build.build import build_cache
    from craftcli.config.cache import CacheConfig
    from craftcli.sources import open_anchor_data

    def build(output: Path, *, stop: bool = False, **changed: Any) -> Any:
        config = CacheConfig(
            dataset=("demo:3", "craft-demo/new"),
            samples=24,
            batch_size=4,
            chunk_mib=0.011,
            device="cpu",
            output=output,
            **changed,
        )
        rows: list[int] = []

        def on_rows(count: int) -> None:
            rows.append(count)
            if stop and sum(rows) >= 16:
                raise KeyboardInterrupt

        data = open_anchor_data(config, teacher)
        return build_cache(config, teacher, data, on_plan=lambda _: None, on_rows=on_rows)

    build(tmp_path / "whole.zarr")
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "resumed.zarr", stop=True)
    assert build(tmp_path / "resumed.zarr", resume=True).reused == 3
    assert tree(tmp_path / "whole.zarr") == tree(tmp_path / "resumed.zarr")


def test_a_weight_beyond_the_frames_is_refused_with_what_would_fit(
    craft: Callable[..., Any],
) -> None:
    many = ("--samples", 1000, "--device", "cpu")
    result = craft("cache", "build", "--dataset", "demo:9", "--dataset", "craft-demo/new", *many)
    assert result.exit_code == EXIT_USAGE
    assert "craft-demo/old has 720 frames, and its share (90.0%) is 900" in result.stderr
    assert "use --samples 800 or fewer" in result.stderr


def test_held_out_anchors_leave_out_frames_of_either_dataset(
    craft: Callable[..., Any], anchors: Path, tmp_path: Path
) -> None:
    held = tmp_path / "held.zarr"
    samples = ("--samples", 8, "--device", "cpu", "--kind", "hidden")
    result = craft(
        "cache", "build", "--dataset", "craft-demo/new", "--exclude", anchors, *samples, "-o", held
    )
    assert result.exit_code == 0, result.output
    taken = CacheReader.open(anchors).read_all("index/dataset_index") - 720
    assert not np.isin(CacheReader.open(held).read_all("index/dataset_index"), taken).any()


def test_caches_of_the_same_datasets_are_joined_into_one(
    craft: Callable[..., Any], anchors: Path, tmp_path: Path
) -> None:
    other, joined = tmp_path / "other.zarr", tmp_path / "joined.zarr"
    assert craft(*BUILD, "--seed", 1, "--device", "cpu", "-o", other).exit_code == 0
    result = craft("cache", "merge", anchors, other, "-o", joined)
    assert result.exit_code == 0, result.output
    readers = [CacheReader.open(path) for path in (anchors, other, joined)]
    frames = [set(reader.read_all("index/dataset_index").tolist()) for reader in readers]
    assert frames[2] == frames[0] | frames[1]
    datasets = readers[2].manifest.datasets
    assert datasets is not None
    assert [d.repo_id for d in datasets] == ["craft-demo/old", "craft-demo/new"]
    result = craft("cache", "inspect", joined, "--verify", "--policy", "demo", "--device", "cpu")
    assert result.exit_code == 0, result.output


def test_dryrun_names_the_shares_and_the_statistics(craft: Callable[..., Any]) -> None:
    result = craft("dryrun", *MIXTURE, "--mode", "none", "--steps", 1, "--device", "cpu")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "craft-demo/new (80.0% of the samples, 480 frames)" in shown
    assert "craft-demo/new and craft-demo/old share these statistics" in shown
    assert "craft train --dataset demo --dataset craft-demo/old:0.25" in result.stderr


def test_statistics_kept_apart_are_saved_resumed_and_evaluated(
    craft: Callable[..., Any], tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    # The same frames with other statistics: the demo's own are the teacher's.
    other = Path(shutil.copytree(demo_root(OLD), tmp_path / "other"))
    stats = json.loads((other / "meta/stats.json").read_text())
    stats["action"]["max"] = [2.0, 3.0]
    (other / "meta/stats.json").write_text(json.dumps(stats))
    mixture = ("--dataset", "demo", "--dataset", f"{other}:0.25")
    plain = ("--mode", "none", "--stats", "dataset")
    result = craft("train", *mixture, *SHORT, *plain, "-o", whole)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "craft-demo/new and other are normalised apart, each with its own" in shown
    last = whole / "checkpoints/last"
    kept = sorted(folder.name for folder in (last / "dataset_processors").iterdir())
    assert kept == ["1", "2"]
    states = [
        next(folder.glob("policy_preprocessor*normalizer*.safetensors")).read_bytes()
        for folder in (
            last / "pretrained_model",
            last / "dataset_processors/1",
            last / "dataset_processors/2",
        )
    ]
    assert states[0] == states[1]
    assert states[1] != states[2]
    shutil.copytree(whole, run, symlinks=True)
    shutil.rmtree(run / "checkpoints/000004")
    (run / "checkpoints/last").unlink()
    (run / "checkpoints/last").symlink_to("000002")
    assert craft("train", "--resume", run).exit_code == 0
    assert (run / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    subject = open_subject(str(run), device="cpu")
    first, second = (subject.policy_for("new", number) for number in (0, 1))
    assert processor_digest(first.preprocess) == processor_digest(subject.checkpoint.preprocess)
    assert processor_digest(second.preprocess) != processor_digest(first.preprocess)


def test_a_resumed_run_is_the_undisturbed_one(
    craft: Callable[..., Any], finished: Path, tmp_path: Path
) -> None:
    half = Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))
    shutil.rmtree(half / "checkpoints/000004")
    (half / "checkpoints/last").unlink()
    (half / "checkpoints/last").symlink_to("000002")
    result = craft("train", "--resume", half)
    assert result.exit_code == 0, result.output
    assert (half / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()
    again = craft("train", "--resume", half, "--dataset", "demo")
    assert again.exit_code == EXIT_USAGE
    assert "--dataset was ('demo', 'craft-demo/old:0.25') and is demo" in again.stderr


def test_a_run_knows_all_its_datasets(craft: Callable[..., Any], finished: Path) -> None:
    manifest = CheckpointManifest.read((finished / "checkpoints/last").resolve())
    assert manifest is not None
    assert [manifest.depends[kind].name for kind in ("dataset", "dataset.2")] == [
        "craft-demo/new",
        "craft-demo/old",
    ]
    summary = RunSummary.read(finished)
    assert summary is not None
    assert summary.dataset == "craft-demo/new+craft-demo/old"
    result = craft("inspect", finished)
    assert result.exit_code == 0, result.output
    assert "demo, craft-demo/old:0.25" in result.stdout
    for name in ("Dataset", "Dataset 2", "Cache"):
        assert name in result.stdout
    assert result.stdout.count("unchanged:") == 3


def test_another_second_dataset_is_noticed_on_resume(
    craft: Callable[..., Any], finished: Path, tmp_path: Path
) -> None:
    half = Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))
    folder = (half / "checkpoints/last").resolve()
    manifest = CheckpointManifest.read(folder)
    assert manifest is not None
    before = manifest.depends["dataset.2"]
    assert before.files is not None
    files = {**before.files, "meta/tasks.parquet": "0"}
    changed = {**manifest.depends, "dataset.2": type(before)(**{**vars(before), "files": files})}
    CheckpointManifest(**{**vars(manifest), "depends": changed}).write(folder)
    result = craft("train", "--resume", half)
    assert result.exit_code == EXIT_CHECK_FAILED
    said = " ".join(result.stderr.split())
    assert "the dataset craft-demo/old is not the one of the checkpoint" in said
    assert "meta/tasks.parquet has changed" in said


def test_eval_and_compare_take_the_run(craft: Callable[..., Any], finished: Path) -> None:
    small = ("--episodes", 1, "--samples", 8, "--device", "cpu", "--json")
    result = craft("eval", finished, *small)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["drift"]["rows"] == 24
    assert [(loss["dataset"], loss["group"]) for loss in found["losses"]] == [
        ("craft-demo/old", "old"),
        ("craft-demo/new", "new"),
    ]
    assert found["left_out"] == []
    result = craft("compare", finished, "-o", "page")
    assert result.exit_code == 0, result.output


def test_old_datasets_become_anchors_of_the_run(craft: Callable[..., Any], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(demo_root(OLD), tmp_path / "copy"))
    same = ("--old-dataset", "craft-demo/old", "--old-dataset", copy)
    result = craft("train", *same, *SHORT, "--mode", "action", "--output", tmp_path / "same")
    assert result.exit_code == EXIT_USAGE
    assert "The same dataset is named twice." in result.stderr
    old = ("--old-dataset", "craft-demo/old:3", "--old-dataset", "craft-demo/new:1")
    made = ("--anchor-samples", 16, "--mode", "action", "--output", tmp_path / "run")
    result = craft("train", *old, *SHORT, *made)
    assert result.exit_code == 0, result.output
    assert "16 frames of the old data craft-demo/old+craft-demo/new" in result.stdout
    assert "4 of them show its frames under their own instructions" in " ".join(
        result.stderr.split()
    )
    live = ("--teacher", "live", "--anchor-samples", 16, "--mode", "action")
    result = craft("train", *old, *SHORT, *live, "--output", tmp_path / "live")
    assert result.exit_code == 0, result.output
    (cache,) = tmp_path.glob("anchors-*.zarr")
    frames = CacheReader.open(cache).read_all("index/dataset_index")
    assert int((frames < 720).sum()) == 12
