"""`craft inspect`: what a run is, where it stands, whether it is whole."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from craftcli.engine.run_lock import run_locked
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE

SIZES = ("--steps", 4, "--save-every", 2, "--batch-size", 2, "--anchor-batch-size", 2)
LORA = ("--lora", "r=2,alpha=4,targets=q_proj")


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run of four steps with two checkpoints."""
    from typer.testing import CliRunner

    from craftcli.cli.app import app

    run = tmp_path_factory.mktemp("finished") / "run"
    arguments = ["train", *SIZES, *LORA, "--device", "cpu", "--cache", cache, "-o", run]
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def inspected(craft: Callable[..., Any], run: Path, code: int = 0) -> dict[str, Any]:
    result = craft("inspect", run, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_whole_run(craft: Callable[..., Any], run: Path, cache: Path) -> None:
    found = inspected(craft, run)
    assert (found["state"], found["step"], found["steps"]) == ("finished", 4, 4)
    assert [(c["step"], c["is_last"], c["has_digests"]) for c in found["checkpoints"]] == [
        (2, False, True),
        (4, True, True),
    ]
    assert {d["kind"]: d["state"] for d in found["depends"]} == dict.fromkeys(
        ("cache", "dataset", "lora_base"), "unchanged"
    )
    assert found["problems"] == []
    assert found["settings"]["policy"] == "demo"
    assert found["verdict"]["outcome"] == "unknown"
    assert "Too few retention steps" in craft("inspect", run).stdout
    # A checkpoint of the run stands for the run.
    assert inspected(craft, run / "checkpoints/last")["step"] == 4


def test_it_fits_a_narrow_terminal(
    craft: Callable[..., Any], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = craft("inspect", run)
    assert result.exit_code == 0
    assert "finished at step 4 of 4" in result.stdout
    assert "whole: all files match their digests (last)" in result.stdout
    assert "unchanged:" in result.stdout
    tables = [line for line in result.stdout.splitlines() if "/" not in line]
    assert all(len(line) <= 80 for line in tables)


def test_damage_is_named(craft: Callable[..., Any], run: Path) -> None:
    (run / "checkpoints/000002/training_state/optimizer_state.safetensors").write_bytes(b"")
    (run / "checkpoints/000004/pretrained_model/config.json").unlink()
    (run / "evaluations").mkdir()
    (run / "evaluations/a.json").write_text("{")
    found = inspected(craft, run, EXIT_CHECK_FAILED)
    assert found["problems"][:2] == [
        "checkpoint 2: training_state/optimizer_state.safetensors has changed",
        "checkpoint 4: pretrained_model/config.json is missing",
    ]
    assert "a.json is not an evaluation" in found["problems"][2]
    result = craft("inspect", run)
    assert "is damaged" in result.stderr
    assert "damaged: pretrained_model/config.json is missing (last)" in result.stdout


def test_a_run_of_an_earlier_version_says_that_it_is_not_checked(
    craft: Callable[..., Any], run: Path
) -> None:
    for manifest in run.glob("checkpoints/0*/craft_manifest.json"):
        manifest.unlink()
    result = craft("inspect", run)
    assert result.exit_code == 0
    assert "not checked: saved without digests" in result.stdout


def test_where_a_run_stands(craft: Callable[..., Any], run: Path) -> None:
    (run / "checkpoints/last").unlink()
    (run / "checkpoints/last").symlink_to("000002")
    assert inspected(craft, run)["state"] == "interrupted"
    with run_locked(run):
        found = inspected(craft, run)
        assert found["state"] == "running"
        assert found["writer"].startswith("process ")
    shutil.rmtree(run / "checkpoints")
    assert inspected(craft, run)["state"] == "empty"


def test_what_follows_depends_on_where_the_run_stands(craft: Callable[..., Any], run: Path) -> None:
    def last_line() -> str:
        result = craft("inspect", run)
        assert result.exit_code == 0, result.output
        line: str = result.stderr.splitlines()[-1]
        return line

    assert last_line() == f"Next: craft eval {run}"
    evaluated = craft("eval", run, "--dataset", "demo", "--samples", 2, "--device", "cpu")
    assert evaluated.exit_code == 0, evaluated.output
    assert last_line() == f"Next: craft compare {run}"
    with run_locked(run):
        assert last_line() == f"Next: craft inspect {run}, when it has ended."
    (run / "checkpoints/last").unlink()
    (run / "checkpoints/last").symlink_to("000002")
    assert last_line() == f"Next: craft train --resume {run}"
    shutil.rmtree(run / "checkpoints")
    assert last_line().startswith(f"Next: craft train --output {run} --overwrite")


def test_damage_has_a_fix_and_no_next_command(craft: Callable[..., Any], run: Path) -> None:
    (run / "checkpoints/000004/pretrained_model/config.json").unlink()
    stderr = craft("inspect", run).stderr
    assert "--from 2" in stderr
    assert "Next:" not in stderr


def test_a_cache_that_is_gone_is_missing(
    craft: Callable[..., Any], run: Path, tmp_path: Path
) -> None:
    from craftcli.engine.checkpoint_manifest import CheckpointManifest
    from craftcli.engine.outside import Dependency

    manifest = CheckpointManifest.read(run / "checkpoints/last")
    assert manifest
    gone = Dependency(name="a.zarr", folder=str(tmp_path / "a.zarr"), digest="0")
    CheckpointManifest(
        files=manifest.files, log=manifest.log, depends={**manifest.depends, "cache": gone}
    ).write(run / "checkpoints/000004")
    states = {d["kind"]: d["state"] for d in inspected(craft, run)["depends"]}
    assert states == {"cache": "missing", "dataset": "unchanged", "lora_base": "unchanged"}


def test_a_cache_is_not_a_run(craft: Callable[..., Any], cache: Path) -> None:
    result = craft("inspect", cache)
    assert result.exit_code == EXIT_USAGE
    assert f"craft cache inspect {cache}" in result.stderr


@pytest.mark.parametrize("given", [("nowhere",), ()])
def test_what_is_no_run(craft: Callable[..., Any], given: tuple[str, ...]) -> None:
    assert craft("inspect", *given).exit_code == EXIT_USAGE
