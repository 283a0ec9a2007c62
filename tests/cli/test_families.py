"""The commands in turn, for policies of every family, saved by LeRobot, on LeRobot's datasets."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import smolvla
from tiny.act import ACT
from tiny.diffusion import DIFFUSION
from tiny.family import Family
from tiny.molmoact2 import MOLMOACT2
from tiny.multi_task_dit import FLOWED
from tiny.pi0 import PI0
from tiny.pi0_fast import PI0_FAST
from tiny.pi05 import PI05
from tiny.smolvla import SMOLVLA
from tiny.vqbet import VQBET
from tiny.world import save, write_dataset
from tiny.xvla import XVLA
from typer.testing import CliRunner

from craftcli.cli.app import app
from craftcli.config.retention import DEFAULT_EPSILON
from craftcli.policies.families.diffusion import DiffusionAdapter

FAMILIES = (SMOLVLA, PI05, ACT, DIFFUSION, PI0_FAST, PI0, XVLA, FLOWED, VQBET, MOLMOACT2)
SAMPLES, STEPS = 6, 3
SMALL = ("--device", "cpu", "--batch-size", "2")

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An old and a new dataset."""
    folder = tmp_path_factory.mktemp("data")
    return write_dataset(folder / "old"), write_dataset(folder / "new", seed=6)


def run(*arguments: Any) -> Any:
    """What a command says as JSON."""
    command = [*map(str, arguments), *SMALL, "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def build(policy: Path, old: Path, cache: Path, kind: str) -> Any:
    return run(
        *("cache", "build", "--policy", policy, "--dataset", old, "--samples", SAMPLES),
        *("--kind", kind, "--output", cache),
    )


@families
def test_build_train_and_eval(
    family: Family, data: tuple[Path, Path], tmp_path: Path, craft: Callable[..., Any]
) -> None:
    old, new = data
    policy = family.make(tmp_path / "policy")
    both, states = tmp_path / "both.zarr", tmp_path / "states.zarr"
    built = build(policy, old, both, "hidden+action")
    assert built["rows"] == SAMPLES
    trained = run(
        *("train", "--mode", "hidden", "--policy", policy, "--dataset", new, "--cache", both),
        *("--anchor-batch-size", "2", "--steps", STEPS, "--lr", "1e-3", "--output", "trained"),
    )
    assert trained["last"]["step"] == STEPS
    assert trained["last"]["mode"] == "hidden"

    found = run("eval", "trained", "--samples", "4")
    assert found["left_out"] == []
    drift = found["drift"]
    assert drift["rows"] == drift["shared_rows"] == SAMPLES
    assert drift["layers"]
    assert all(0 < layer["nmse"] < math.inf for layer in drift["layers"])
    assert all(0 < layer["cka"] <= 1 + 1e-6 for layer in drift["layers"])
    assert drift["action"]["kind"] == ("kl" if family is PI0_FAST else "nmse")
    assert 0 < drift["action"]["value"] < math.inf
    assert {loss["group"]: loss["dataset"] for loss in found["losses"]} == {
        "old": "old",
        "new": "new",
    }
    assert all(math.isfinite(loss["mean"]) for loss in found["losses"])
    assert all(math.isfinite(mean) for loss in found["losses"] for mean in loss["by_task"].values())

    # Without the teacher's outputs in the cache, the teacher itself is asked to act.
    build(policy, old, states, "hidden")
    asked = run("eval", "trained", "--cache", states)
    assert asked["drift"]["layers"]
    action = asked["drift"]["action"]
    assert asked["left_out"] == []
    assert action["kind"] == "chunk_nmse"
    assert 0 <= action["value"] < math.inf


def test_a_diffusion_policy_has_a_budget_of_its_own_and_an_earlier_run_keeps_the_common_one(
    data: tuple[Path, Path], tmp_path: Path, craft: Callable[..., Any]
) -> None:
    old, new = data
    policy = DIFFUSION.make(tmp_path / "policy")
    build(policy, old, tmp_path / "both.zarr", "hidden+action")
    training = ("--policy", policy, "--dataset", new, "--cache", "both.zarr", "--steps", "2")
    own, common = DiffusionAdapter().epsilon_of("up"), DEFAULT_EPSILON
    begun = craft("train", *training, *SMALL, "--anchor-batch-size", "2", "--output", "run")
    assert f"epsilon-start  {own}" in re.sub(" +", "  ", begun.stdout)
    given = run("train", *training, "--epsilon-start", "0.3", "--output", "given")
    assert given["last"]["epsilon"] == 0.3

    last = Path("run/checkpoints/last")
    state = json.loads((last / "craft_state.json").read_text())
    assert state.pop("weighs_rows") is True
    again = ("train", "--resume", "run", "--steps")
    resumed = CliRunner().invoke(app, [*again, "3", "--json"], catch_exceptions=False)
    assert json.loads(resumed.stdout)["last"]["epsilon"] == own
    # A run of an earlier version says nothing of weights, and its checkpoint has no digests.
    state = json.loads((last / "craft_state.json").read_text())
    del state["weighs_rows"]
    (last / "craft_state.json").write_text(json.dumps(state))
    (last / "craft_manifest.json").unlink()
    for steps in ("4", "5"):
        resumed = CliRunner().invoke(app, [*again, steps, "--json"], catch_exceptions=False)
        assert json.loads(resumed.stdout)["last"]["epsilon"] == common


@pytest.mark.parametrize(("mode", "code"), [("hidden", 3), ("hidden+action", 0)])
def test_a_frozen_stack_is_named(
    mode: str, code: int, data: tuple[Path, Path], tmp_path: Path, craft: Callable[..., Any]
) -> None:
    """By default smolvla trains its expert alone, and the state's projection before both."""
    old, new = data
    vlm = smolvla.write_vlm(tmp_path / "vlm")
    policy = save(tmp_path / "policy", smolvla.policy(vlm, train_state_proj=False))
    run(
        *("cache", "build", "--policy", policy, "--dataset", old, "--samples", SAMPLES),
        *("--kind", "hidden+action", "--stack", "vlm", "--output", "frozen.zarr"),
    )
    training = ("--policy", policy, "--dataset", new, "--cache", "frozen.zarr", "--mode", mode)
    small = (*SMALL, "--anchor-batch-size", "2", "--steps", "1")
    trained = craft("train", *training, *small)
    assert trained.exit_code == code, trained.output
    dry = craft("dryrun", *training, *small)
    assert dry.exit_code == code, dry.output
    if code:
        assert "Retention would do nothing" in trained.stderr
        assert re.search(r"reaches none of the \d+ trainable tensors", trained.stderr)
    else:
        assert "hidden reaches none of the trainable tensors" in trained.stderr
        assert "hidden reaches none of the trainable tensors" in dry.stdout


@pytest.mark.parametrize(("mode", "code"), [("hidden", 3), ("hidden+action", 0)])
def test_next_to_nothing_that_is_held_is_a_failed_check(
    mode: str, code: int, data: tuple[Path, Path], tmp_path: Path, craft: Callable[..., Any]
) -> None:
    """In a frozen stack of smolvla, hidden states hold the projection of the state and no more."""
    old, new = data
    vlm = smolvla.write_vlm(tmp_path / "vlm")
    policy = save(tmp_path / "policy", smolvla.policy(vlm))
    run(
        *("cache", "build", "--policy", policy, "--dataset", old, "--samples", SAMPLES),
        *("--kind", "hidden+action", "--stack", "vlm", "--output", "frozen.zarr"),
    )
    training = ("--policy", policy, "--dataset", new, "--cache", "frozen.zarr", "--mode", mode)
    dry = craft("dryrun", *training, *SMALL, "--anchor-batch-size", "2", "--steps", "1")
    assert dry.exit_code == code, dry.output
    message = " ".join(dry.output.split())
    if code:
        assert "✗ failed: Retention reaches what is trained: Retention would hold" in message
        assert re.search(r"reaches 2 of \d+ trained tensors, under 1 % of the trained", message)
    else:
        assert "100 % of the trained weights" in message
