"""`craft cache build` and `craft cache inspect` as a user meets them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from craftcli.choices import Pooling
from craftcli.cli.app import app
from craftcli.config.cache import CacheConfig
from craftcli.config.settings import option_name
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER

BUILD = ("cache", "build", "--samples", "16")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The result of a build and the cache it wrote; tests must not change it."""
    path = tmp_path_factory.mktemp("built") / "anchors.zarr"
    arguments = [*BUILD, "--layers", "-2,-1", "--output", str(path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result, path


@pytest.fixture
def damaged(cache: Path, tmp_path: Path) -> Path:
    """A cache of 32 rows with one bit of its last layer flipped."""
    copy = Path(shutil.copytree(cache, tmp_path / "damaged.zarr"))
    chunk = copy / "hidden/vlm.3/c/0/0/0"
    content = bytearray(chunk.read_bytes())
    content[1000] ^= 1
    chunk.write_bytes(content)
    return copy


def inspected(craft: Callable[..., Any], path: Path, *options: str) -> dict[str, Any]:
    result = craft("cache", "inspect", path, "--json", *options)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_build_estimates_the_size_before_it_writes(built: tuple[Any, Path]) -> None:
    result, path = built
    plan, what, done = result.stdout.splitlines()
    assert plan.startswith("Storing 16 rows of about 8.3 KiB, 154.6 KiB in all, to ")
    assert what == ("Layers 2 (-2), 3 (-1) of 4 in stack vlm, pooling action_tokens, float32")
    assert done.startswith(f"Wrote {path}: 16 rows, ")
    assert (path / "zarr.json").is_file()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_large_build_names_options_that_store_less(
    craft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "store less" not in craft(*BUILD).stderr
    monkeypatch.setattr("craftcli.cli.cache.build._LARGE", 100_000)
    told = " ".join(craft(*BUILD, "--overwrite").stderr.split())
    assert "Options that store less: --dtype bfloat16 (about 110.6 KiB), --pooling" in told
    assert "--layers -1 (about " in told
    assert "--samples 8 (about " in told


def test_build_says_that_it_uses_the_demo(built: tuple[Any, Path]) -> None:
    assert "Using the built-in demo" in built[0].stderr


def test_the_estimate_is_what_the_rows_take(craft: Callable[..., Any], built: Any) -> None:
    summary = inspected(craft, built[1])
    payload = 16 * summary["bytes_per_row"]
    # Metadata and statistics come on top and do not grow with the rows.
    assert payload <= summary["size_bytes"] <= payload + 64 * 1024


def test_verbose_shows_all_settings(craft: Callable[..., Any]) -> None:
    result = craft(*BUILD, "--verbose")
    assert result.exit_code == 0
    table = result.stdout.partition("Configuration\n")[2].partition("Storing 16 rows")[0]
    shown = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert shown.keys() == {option_name(name)[2:] for name in CacheConfig.names()}
    assert shown["samples"] == ["16", "(flag)"]
    assert shown["chunk-mib"] == ["16.0", "(default)"]
    assert shown["layers"] == ["not", "set", "(default)"]


def test_build_with_json_prints_one_document_and_nothing_else(craft: Callable[..., Any]) -> None:
    result = craft(*BUILD, "--json")
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert (summary["rows"], summary["complete"]) == (16, True)
    assert "Storing 16 rows" in result.stderr


@pytest.mark.parametrize(("kind", "used"), [((), True), (("--kind", "hidden"), False)])
def test_a_setting_without_effect_is_named(
    craft: Callable[..., Any], kind: tuple[str, ...], used: bool
) -> None:
    result = craft(*BUILD, *kind, "--top-k", 4)
    assert result.exit_code == 0
    warning = "have no effect here: --top-k (without --kind action)."
    assert (warning in " ".join(result.stderr.split())) != used
    assert ("Warning" in result.stderr) != used


@pytest.mark.parametrize("layers", ["2,3", "-2,3", "-1,-2"])
def test_layers_of_either_sign_name_the_same_layers(
    craft: Callable[..., Any], tmp_path: Path, layers: str
) -> None:
    assert craft(*BUILD, "--layers", layers).exit_code == 0
    assert sorted(inspected(craft, tmp_path / "anchors.zarr")["layers"]) == [2, 3]


@pytest.mark.parametrize("pooling", list(Pooling))
def test_every_pooling_builds(craft: Callable[..., Any], tmp_path: Path, pooling: Pooling) -> None:
    result = craft("cache", "build", "--samples", 4, "--layers", "-1", "--pooling", pooling)
    assert result.exit_code == 0, result.output
    summary = inspected(craft, tmp_path / "anchors.zarr", "--verify")
    vectors = {Pooling.ACTION_TOKENS: 11, Pooling.VISION_TEXT: 2}.get(pooling, 1)
    assert (summary["pooling"], summary["vectors"], summary["dim"]) == (pooling, vectors, 64)
    assert summary["layer_norms"][0]["min"] > 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_precision_builds(craft: Callable[..., Any], tmp_path: Path, dtype: str) -> None:
    assert craft(*BUILD, "--dtype", dtype).exit_code == 0
    summary = inspected(craft, tmp_path / "anchors.zarr", "--verify")
    assert summary["dtype"] == dtype


def test_the_seed_selects_the_rows(craft: Callable[..., Any], tmp_path: Path) -> None:
    digests = []
    for number, seed in enumerate((7, 7, 8)):
        path = tmp_path / f"{number}.zarr"
        assert craft(*BUILD, "--seed", seed, "-o", path).exit_code == 0
        digests.append(inspected(craft, path)["dataset"]["selection_digest"])
    assert digests[0] == digests[1] != digests[2]


def test_inspect_shows_what_is_in_the_cache(craft: Callable[..., Any], built: Any) -> None:
    result = craft("cache", "inspect", built[1])
    assert (result.exit_code, result.stderr) == (0, f"Next: craft train --cache {built[1]}\n")
    flat = " ".join(result.stdout.split())
    for shown in (
        "Rows 16 (16 valid) in 1 chunks",
        "Complete yes",
        "Layers 2, 3 of 4 in stack vlm",
        "Pooling action_tokens: 11 vectors of 64 a layer",
        "Stored as float32, images reference",
        "KiB, 8.3 KiB a row",
        "craft_tiny_pi0_fast, float32",
        "Dataset craft-demo/old: 180 episodes, 720 frames",
        "Selection per_phase, seed 0",
        "Norm of the hidden states vlm.2 mean ",
        " vlm.3 mean ",
        "reach the red block",
    ):
        assert shown in flat


def test_inspect_as_json_has_it_all(craft: Callable[..., Any], built: Any) -> None:
    summary = inspected(craft, built[1])
    assert summary["rows"] == summary["valid_rows"] == 16
    assert summary["complete"] is True
    assert summary["verified"] is False
    assert (summary["layers"], summary["layer_count"]) == ([2, 3], 4)
    assert (summary["pooling"], summary["dtype"]) == ("action_tokens", "float32")
    size = sum(file.stat().st_size for file in built[1].rglob("*") if file.is_file())
    assert summary["size_bytes"] == size
    assert summary["teacher"]["source"] == str(TEACHER_FOLDER)
    assert len(summary["teacher"]["weights_digest"]) == 64
    assert (summary["dataset"]["repo_id"], summary["dataset"]["frames"]) == ("craft-demo/old", 720)
    assert [norms["layer"] for norms in summary["layer_norms"]] == ["vlm.2", "vlm.3"]
    assert all(0 < n["min"] <= n["mean"] <= n["max"] for n in summary["layer_norms"])
    assert sum(summary["tasks"].values()) == 16


def test_verify_passes_on_a_sound_cache(craft: Callable[..., Any], built: Any) -> None:
    result = craft("cache", "inspect", built[1], "--verify")
    assert result.exit_code == 0
    assert "Verified: all 1 chunks match their checksums." in result.stdout
    assert inspected(craft, built[1], "--verify")["verified"] is True


def test_verify_names_array_and_rows_of_a_flipped_bit(
    craft: Callable[..., Any], damaged: Path
) -> None:
    result = craft("cache", "inspect", damaged, "--verify", "--json")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "is damaged" in result.stderr
    assert "hidden/vlm.3 chunk 0 (rows 0 to 31): the checksum does not match" in result.stderr
    assert "hidden/vlm.2" not in result.stderr
    assert "Fix: rebuild it with craft cache build --overwrite." in result.stderr


def test_training_refuses_a_flipped_bit(craft: Callable[..., Any], damaged: Path) -> None:
    result = craft("train", "--steps", 1, "--cache", damaged)
    assert result.exit_code == 1
    assert "hidden/vlm.3 chunk 0 (rows 0 to 31)" in result.stderr


def test_overwrite_replaces_a_cache(craft: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "anchors.zarr"
    assert craft(*BUILD).exit_code == 0
    assert craft("cache", "build", "--samples", 8, "--overwrite").exit_code == 0
    assert inspected(craft, path)["rows"] == 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["anchors.zarr"]


def test_a_build_takes_the_place_of_one_that_was_killed_when_asked(
    craft: Callable[..., Any], cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(cache, tmp_path / "anchors.zarr.partial")
    assert craft(*BUILD).exit_code == 1
    assert craft(*BUILD, "--overwrite").exit_code == 0
    assert inspected(craft, tmp_path / "anchors.zarr")["rows"] == 16
    assert [entry.name for entry in tmp_path.iterdir()] == ["anchors.zarr"]


def test_an_interrupted_build_leaves_nothing(
    craft: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        assert (tmp_path / "anchors.zarr.partial").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr("craftcli.cache.build.build.CacheWriter.write_chunk", interrupt)
    result = craft(*BUILD)
    assert result.exit_code == 130
    assert list(tmp_path.iterdir()) == []
