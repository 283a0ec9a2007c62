"""Datasets with other feature names than the policy's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny.act import policy as tiny_act
from tiny.world import CAMERAS, save, write_dataset

from craftcli.config.cache import CacheConfig
from craftcli.config.parsing import parse_renames
from craftcli.errors import CraftError
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset

THEIRS = "observation.images.cam"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("act") / "policy", tiny_act(cameras=1))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same frames, with the camera under the policy's name and under another."""
    folder = tmp_path_factory.mktemp("data")
    ours = write_dataset(folder / "ours")
    theirs = Path(shutil.copytree(ours, folder / "theirs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiny.world.CAMERAS", (THEIRS,))
        shutil.rmtree(theirs)
        write_dataset(theirs)
    return {"ours": ours, "theirs": theirs}


def test_a_renamed_camera_reaches_the_policy(policy: Path, data: dict[str, Path]) -> None:
    opened = load_checkpoint(str(policy), device="cpu", renames={THEIRS: CAMERAS[0]})
    config = opened.policy.config
    assert opened.renames == {THEIRS: CAMERAS[0]}
    dataset = open_dataset(
        str(data["theirs"]), root=None, policy_config=config, renames=opened.renames
    )
    batch = opened.preprocess(read_rows(dataset, [0, 1]))
    assert CAMERAS[0] in batch
    assert THEIRS not in batch
    with pytest.raises(CraftError, match=rf"no camera of {CAMERAS[0]}.*{THEIRS}.*--rename"):
        open_dataset(str(data["theirs"]), root=None, policy_config=config)
    clash = {CAMERAS[1]: CAMERAS[0]}
    with pytest.raises(CraftError, match="which it has already"):
        open_dataset(str(data["ours"]), root=None, policy_config=config, renames=clash)


def test_build_and_train_with_a_rename_and_resume_without(
    craft: Callable[..., Any], policy: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    """Anchors from the policy's own names, the new task from other ones, one map for both."""
    fixed = ("--policy", policy, "--device", "cpu", "--rename", f"{THEIRS}={CAMERAS[0]}")
    built = craft("cache", "build", *fixed, "--dataset", data["ours"], "--samples", "8")
    assert built.exit_code == 0, built.output
    steps = ("--steps", "4", "--batch-size", "2", "--anchor-batch-size", "4", "--save-every", "2")
    ran = craft("train", *fixed, "--dataset", data["theirs"], *steps, "-o", "run")
    assert ran.exit_code == 0, ran.output
    saved = load_checkpoint(str(tmp_path / "run"), device="cpu")
    assert saved.renames == {THEIRS: CAMERAS[0]}
    last = tmp_path / "run/checkpoints/last"
    last.unlink()
    last.symlink_to("000002")
    resumed = craft("train", "--resume", "run")
    assert resumed.exit_code == 0, resumed.output
    # The map is known to the run: for both datasets, and for the teacher when it is asked to act.
    states = craft(
        *("cache", "build", *fixed, "--dataset", data["ours"], "--samples", "8"),
        *("--kind", "hidden", "-o", "states.zarr"),
    )
    assert states.exit_code == 0, states.output
    for more in ((), ("--cache", "states.zarr")):
        evaluated = craft("eval", "run", "--device", "cpu", "--samples", "4", *more, "--json")
        assert evaluated.exit_code == 0, evaluated.output
        found = json.loads(evaluated.stdout)
        assert found["left_out"] == []
        assert found["drift"]["action"]["kind"] == ("chunk_nmse" if more else "nmse")
        assert len(found["losses"]) == (0 if more else 2)
    other = ("--policy", policy, "--device", "cpu", "--dataset", data["ours"])
    refused = craft("train", *other, *steps, "-o", "other")
    assert refused.exit_code == 1
    assert "processor_digest" in refused.output


@pytest.mark.parametrize("text", ["a", "a=", "=b", "a=b=c", "a=b,a=c", "a=b,c=b", ""])
def test_a_map_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(CraftError, match="--rename"):
        CacheConfig(policy="p", dataset="d", rename=text)
    with pytest.raises(ValueError, match=r"not OLD=NEW|twice"):
        parse_renames(text)


def test_the_demo_renames_nothing() -> None:
    with pytest.raises(CraftError, match="--rename needs --policy and --dataset"):
        CacheConfig(rename="a=b")
