"""`craft train --resume`: what it needs, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from craftcli.distributed import Processes
from craftcli.engine.resuming import read_run
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE, CraftError

SIZES = ("--steps", 4, "--save-every", 2, "--batch-size", 4, "--anchor-batch-size", 4)
WEIGHTS = "pretrained_model/model.safetensors"
SHORT = (*SIZES, "--log-every", 1, "--device", "cpu")


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that has saved at the second."""
    from typer.testing import CliRunner

    from craftcli.cli.app import app

    run = tmp_path_factory.mktemp("finished") / "run"
    arguments = ["train", *map(str, SHORT), "--cache", str(cache), "-o", str(run)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def half(finished: Path, tmp_path: Path) -> Path:
    """The same run as it was after its second step."""
    run = Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))
    shutil.rmtree(run / "checkpoints/000004")
    (run / "checkpoints/last").unlink()
    (run / "checkpoints/last").symlink_to("000002")
    return run


def test_it_needs_nothing_else(craft: Callable[..., Any], half: Path, finished: Path) -> None:
    result = craft("train", "--resume", half)
    assert result.exit_code == 0, result.output
    assert "Resuming after step 2 of 4" in result.stdout
    assert "Step 3/4 |" in result.stdout
    assert "Step 2/4 |" not in result.stdout
    weights = "checkpoints/last/pretrained_model/model.safetensors"
    assert (half / weights).read_bytes() == (finished / weights).read_bytes()
    steps = [json.loads(line)["step"] for line in (half / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--lr", "0.5"), "--lr was None and is 0.5"),
        (("--mode", "none"), "--mode was hidden+action and is none"),
        (("--policy", "elsewhere", "--dataset", "there"), "--policy was demo and is elsewhere"),
    ],
)
def test_other_settings_are_refused_by_name(
    craft: Callable[..., Any], half: Path, option: tuple[str, ...], message: str
) -> None:
    result = craft("train", "--resume", half, *option)
    assert result.exit_code == EXIT_USAGE
    assert message in result.stderr
    assert (half / "checkpoints/last").readlink() == Path("000002")


def test_a_folder_that_is_no_run(craft: Callable[..., Any], tmp_path: Path) -> None:
    result = craft("train", "--resume", tmp_path)
    assert result.exit_code == 1
    assert "no readable checkpoint" in result.stderr


@pytest.mark.parametrize(
    "file",
    [
        "pretrained_model/model.safetensors",
        "training_state/optimizer_state.safetensors",
        "training_state/rng_state.safetensors",
        "craft_state.json",
    ],
)
def test_a_missing_part_of_the_checkpoint(craft: Callable[..., Any], half: Path, file: str) -> None:
    (half / "checkpoints/000002" / file).unlink()
    result = craft("train", "--resume", half)
    # The state is read first; the others are missed by the manifest.
    assert result.exit_code == (1 if file == "craft_state.json" else EXIT_CHECK_FAILED)
    assert "Traceback" not in result.output
    assert Path(file).name.split(".")[0] in result.stderr or "not whole" in result.stderr


def test_processes_that_cannot_share_the_batches(half: Path) -> None:
    with pytest.raises(CraftError, match=r"with 3 processes.*--batch-size of 4"):
        read_run(half, {}, Processes(rank=0, world=3))
    shared = read_run(half, {}, Processes(rank=0, world=2)).config
    assert (shared.batch_size, shared.anchor_batch_size) == (2, 2)


def test_a_run_without_anchors_is_shared_too(tmp_path: Path, craft: Callable[..., Any]) -> None:
    run = tmp_path / "plain"
    sizes = ("--steps", 2, "--save-every", 1, "--batch-size", 4, "--device", "cpu")
    assert craft("train", "--mode", "none", "--output", run, *sizes).exit_code == 0
    shared = read_run(run, {}, Processes(rank=0, world=2), step=1).config
    assert (shared.batch_size, shared.anchor_batch_size) == (2, None)


def test_an_anchor_cache_that_disappears_ends_with_a_saved_step(
    craft: Callable[..., Any], cache: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from craftcli.engine.retention.anchors import AnchorSet

    read, turns = AnchorSet.batch, []

    def batch(self: AnchorSet, number: int, *rest: Any, **options: Any) -> Any:
        turns.append(number)
        if number == 2:
            raise CraftError("The cache is gone.", why="it was removed.", fix="put it back.")
        return read(self, number, *rest, **options)

    monkeypatch.setattr(AnchorSet, "batch", batch)
    result = craft("train", *SHORT, "--save-every", 0, "--cache", cache, "-o", "run")
    assert result.exit_code == 1
    assert "The cache is gone." in result.stderr
    assert "Step 2 is saved: craft train --resume run continues" in result.stderr
    monkeypatch.setattr(AnchorSet, "batch", read)
    assert craft("train", "--resume", "run").exit_code == 0
    # The batch and the random numbers of the failed step come again: it ends as if nothing was.
    for file in (WEIGHTS, "training_state/rng_state.safetensors", "craft_state.json"):
        ended = Path("run/checkpoints/last") / file
        assert ended.read_bytes() == (finished / "checkpoints/last" / file).read_bytes(), file


def test_the_verdict_counts_the_steps_before_a_resume(
    craft: Callable[..., Any], half: Path, finished: Path
) -> None:
    def record(run: Path) -> Any:
        state = json.loads((run / "checkpoints/last/craft_state.json").read_text())
        return state["budget_record"], state["verdict"]

    assert craft("train", "--resume", half).exit_code == 0
    assert record(half) == record(finished)
    assert record(half)[1]["turns"] == 4


def test_a_run_of_an_earlier_version_keeps_its_rule_and_says_so(
    craft: Callable[..., Any], half: Path
) -> None:
    """It has no digests, no record, no rule, and a setting of two values."""
    saved = half / "checkpoints/000002"
    (saved / "craft_manifest.json").unlink(missing_ok=True)
    for file in (half / "craft_config.json", saved / "craft_config.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "freeze_downstream": False}))
    state = json.loads((saved / "craft_state.json").read_text())
    for name in ("budget_record", "verdict", "froze_downstream"):
        del state[name]
    del state["retention"]["joint"]["multiplier"]["rule"]
    (saved / "craft_state.json").write_text(json.dumps(state))
    (half / "summary.json").unlink()
    result = craft("train", "--resume", half, "--accept-changes", "--json")
    assert result.exit_code == 0, result.output
    assert "λ moves as in the version of craft that began this run" in result.stderr
    verdict = json.loads(result.stdout)["verdict"]
    assert (verdict["since"], verdict["turns"]) == (2, 2)
    now = json.loads((half / "checkpoints/last/craft_state.json").read_text())
    assert now["retention"]["joint"]["multiplier"]["rule"] == "absolute"
