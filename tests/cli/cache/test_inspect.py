"""`craft cache inspect` beside a policy and a dataset; its re-run, its plot, half-built caches."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made.manifests import edit_manifest
from safetensors.torch import load_file, save_file

from craftcli.choices import Images
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.engine.retention.anchors import AnchorBatch, AnchorSet

Craft = Callable[..., Any]
INSPECT = ("cache", "inspect")
TEACHER = [
    f"teacher.{name}"
    for name in ("policy_type", "weights_digest", "config_digest", "processor_digest")
]
DATASET = [f"dataset.{name}" for name in ("fingerprint", "episodes", "frames")]

PLAIN_INSPECT = """
import json, sys
from typer.testing import CliRunner
from craftcli.cli.app import app
result = CliRunner().invoke(app, ["cache", "inspect", sys.argv[1]])
assert result.exit_code == 0, result.output
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


@pytest.fixture
def own_cache(cache: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cache, tmp_path / "own.zarr"))


@pytest.fixture
def other_policy(tmp_path: Path) -> Path:
    """The teacher with one weight moved."""
    folder = Path(shutil.copytree(TEACHER_FOLDER, tmp_path / "other"))
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, folder / "model.safetensors")
    return folder


def shown(craft: Craft, *arguments: Any, code: int = 0) -> dict[str, Any]:
    result = craft(*INSPECT, *arguments, "--json")
    assert result.exit_code == code, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


class TestIdentity:
    def test_the_demo_built_it(self, craft: Craft, cache: Path) -> None:
        options = (cache, "--policy", "demo", "--dataset", "demo")
        document = shown(craft, *options)
        assert [match["field"] for match in document["identity"]] == TEACHER + DATASET
        assert all(m["matches"] and m["cached"] == m["given"] for m in document["identity"])
        assert document["rerun"] is None
        text = craft(*INSPECT, *options).stdout
        assert "teacher.weights_digest" in text
        assert "DIFFERS" not in text

    def test_a_teacher_that_lies_elsewhere_is_the_same(
        self, craft: Craft, cache: Path, tmp_path: Path
    ) -> None:
        moved = shutil.copytree(TEACHER_FOLDER, tmp_path / "moved")
        assert all(m["matches"] for m in shown(craft, cache, "--policy", moved)["identity"])

    def test_another_policy_is_refused_by_field(
        self, craft: Craft, cache: Path, other_policy: Path
    ) -> None:
        result = craft(*INSPECT, cache, "--policy", other_policy)
        assert result.exit_code == 3
        assert "was built from another policy or dataset" in result.stderr
        assert "teacher.weights_digest is " in result.stderr
        assert "config_digest" not in result.stderr
        assert result.stdout.count("DIFFERS") == 1
        assert result.stdout.count("matches: ") == 3

    def test_another_dataset_is_refused_by_field_and_needs_no_policy(
        self, craft: Craft, cache: Path, new_data: Any
    ) -> None:
        document = shown(craft, cache, "--dataset", new_data.root, code=3)
        assert [m["field"] for m in document["identity"] if not m["matches"]] == DATASET
        result = craft(*INSPECT, cache, "--dataset", "x/new", "--dataset-root", new_data.root)
        assert result.exit_code == 3
        assert "dataset.episodes is 180 in the cache and 120 in the one given" in result.stderr

    def test_a_policy_that_does_not_open_is_an_error(self, craft: Craft, cache: Path) -> None:
        result = craft(*INSPECT, cache, "--policy", "./nowhere", "--json")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "No policy at ./nowhere" in result.stderr


class TestRerun:
    def test_a_few_rows_over_the_whole_file(self, craft: Craft, cache: Path) -> None:
        document = shown(craft, cache, "--verify")
        rows = document["rerun"]["rows"]
        assert [row["row"] for row in rows] == [0, 4, 9, 13, 18, 22, 27, 31]
        assert all(row["passed"] and row["drift"] <= row["tolerance"] == 1e-6 for row in rows)
        assert (document["verified"], document["rerun"]["not_run"]) == (True, None)
        assert document["identity"] is None
        again = shown(craft, cache, "--verify", "--verify-rows", "3", "--policy", "demo")
        assert [row["row"] for row in again["rerun"]["rows"]] == [0, 16, 31]

    def test_rows_that_are_off_are_named(
        self, craft: Craft, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = AnchorSet.read

        def changed(self: AnchorSet, rows: Any, device: torch.device) -> AnchorBatch:
            batch = read(self, rows, device)
            batch.targets["vlm.2"][np.isin(rows, (9, 27))] += 1
            return batch

        monkeypatch.setattr(AnchorSet, "read", changed)
        document = shown(craft, cache, "--verify", code=3)
        off = {r["row"]: r["dataset_index"] for r in document["rerun"]["rows"] if not r["passed"]}
        assert list(off) == [9, 27]
        result = craft(*INSPECT, cache, "--verify")
        assert result.exit_code == 3
        assert "no longer reproduces the states" in result.stderr
        for row, index in off.items():
            assert f"row {row} (dataset index {index}) by " in result.stderr
        assert "row 0 " not in result.stderr

    def test_images_by_reference_come_from_their_dataset(
        self, craft: Craft, build: Callable[..., Path], tmp_path: Path, new_data: Any
    ) -> None:
        path = build(tmp_path / "a.zarr", samples=4, images=Images.REFERENCE)
        for given in ((), ("--dataset", "demo"), ("--policy", "demo", "--dataset", "demo")):
            rerun = shown(craft, path, "--verify", *given)["rerun"]
            assert [row["passed"] for row in rerun["rows"]] == [True] * 4
        rerun = shown(craft, path, "--verify", "--dataset", new_data.root, code=3)["rerun"]
        assert (rerun["rows"], "--dataset is another" in rerun["not_run"]) == ([], True)
        edit_manifest(path, "dataset", root=str(tmp_path / "gone"))
        assert (
            "Give the dataset with --dataset" in shown(craft, path, "--verify")["rerun"]["not_run"]
        )

    def test_a_teacher_elsewhere_is_named(self, craft: Craft, own_cache: Path) -> None:
        edit_manifest(own_cache, source="someone/policy", policy_type="pi0_fast")
        result = craft(*INSPECT, own_cache, "--verify")
        assert result.exit_code == 0
        assert "give the teacher, someone/policy, with --policy" in result.stdout
        rerun = shown(craft, own_cache, "--verify")["rerun"]
        assert (rerun["rows"], "--policy" in rerun["not_run"]) == ([], True)

    def test_the_demo_runs_wherever_craft_is_installed(self, craft: Craft, own_cache: Path) -> None:
        edit_manifest(own_cache, source="/elsewhere/craftcli/demo/teacher")
        assert len(shown(craft, own_cache, "--verify")["rerun"]["rows"]) == 8

    def test_a_folder_that_only_the_manifest_names_is_not_opened(
        self, craft: Craft, own_cache: Path
    ) -> None:
        teacher = shutil.copytree(TEACHER_FOLDER, own_cache / "teacher")
        edit_manifest(own_cache, source=str(teacher), policy_type="pi0_fast")
        rerun = shown(craft, own_cache, "--verify")["rerun"]
        assert rerun["rows"] == []
        assert f"give the teacher, {teacher}, with --policy" in rerun["not_run"]

    def test_a_policy_that_is_not_the_teacher_is_not_run(
        self, craft: Craft, cache: Path, other_policy: Path
    ) -> None:
        document = shown(craft, cache, "--verify", "--policy", other_policy, code=3)
        assert document["rerun"] == {
            "not_run": "--policy is not the teacher of the cache",
            "rows": [],
        }

    def test_none_is_a_number_of_rows(self, craft: Craft, cache: Path) -> None:
        result = craft(*INSPECT, cache, "--verify", "--verify-rows", "0")
        assert result.exit_code == 0
        assert "Not re-run: --verify-rows is 0." in result.stdout
        assert "Loading" not in result.stderr


class TestPlot:
    def test_it_is_written(self, craft: Craft, cache: Path, tmp_path: Path) -> None:
        assert shown(craft, cache)["plot"] is None
        assert shown(craft, cache, "--plot", "a.png")["plot"] == "a.png"
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        result = craft(*INSPECT, cache, "--plot", "a.png")
        assert (result.exit_code, "Wrote a.png." in result.stdout) == (0, True)

    def test_what_is_no_plot_is_kept(self, craft: Craft, cache: Path, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_text("mine")
        result = craft(*INSPECT, cache, "--plot", "a.png")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "Cannot write the plot a.png" in result.stderr
        assert (tmp_path / "a.png").read_text() == "mine"


class TestHalfBuilt:
    def test_it_says_how_far_the_build_got(
        self, craft: Craft, build: Callable[..., Path], tmp_path: Path
    ) -> None:
        whole = build(tmp_path / "whole.zarr", samples=12, chunk_mib=0.02)
        chunks = shown(craft, whole)["chunks"]
        assert chunks > 2
        partial = whole.rename(tmp_path / "a.zarr.partial")
        shutil.rmtree(partial / "commit/c/1", ignore_errors=True)
        (partial / "commit/c/1").unlink(missing_ok=True)
        result = craft(*INSPECT, "a.zarr", "--json")
        assert result.exit_code == 1
        assert "half-built" in result.stderr
        assert f"{chunks - 1} of {chunks} chunks are committed." in result.stderr
        assert json.loads(result.stdout) == {
            "path": "a.zarr",
            "complete": False,
            "chunks": chunks,
            "committed_chunks": chunks - 1,
        }

    def test_without_one_there_is_nothing_to_count(self, craft: Craft) -> None:
        result = craft(*INSPECT, "nowhere.zarr", "--json")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "committed" not in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--verify-rows", "3"),
        ("--revision", "main"),
        ("--policy", "demo", "--revision", "main"),
        ("--policy", "demo", "--dataset-root", "somewhere"),
        ("--dataset", "demo", "--dataset-revision", "main"),
        ("--device", "cpu"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    craft: Craft, cache: Path, options: tuple[str, ...]
) -> None:
    result = craft(*INSPECT, cache, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{options[-2]} needs " in result.stderr


@pytest.mark.slow
def test_a_plain_inspect_imports_nothing_heavy(cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_INSPECT, str(cache)],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(json.loads(done.stdout))
    assert "zarr" in loaded
    assert not loaded & {"torch", "lerobot", "transformers", "matplotlib"}
