"""Variations of old frames become a dataset with labels, which the Meta-World example replays."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from craftcli.cache.build.build import open_source
from craftcli.cache.build.prompts import Prompts
from craftcli.config.cache import CacheConfig
from craftcli.policies.lerobot.batches import read_rows
from craftcli.sources import open_anchor_data, open_policy

METAWORLD = Path(__file__).parents[2] / "examples/metaworld_forgetting"
FRAMES, AUGMENT = 6, 2


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(METAWORLD)
        experts = importlib.import_module("experts")
        root: Path = experts.write_dataset(
            tmp_path_factory.mktemp("data") / "old", ("button-press-topdown-v3",), episodes=1
        )
    return root


@pytest.mark.parametrize("family", ["act", "diffusion"])
def test_varied_rows_have_the_labels_of_their_frames(
    family: str, old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(METAWORLD)
    beginnings = importlib.import_module("beginnings")
    varied_replay = importlib.import_module("varied_replay")
    teacher = beginnings.write_fresh(family, tmp_path / "teacher", [old], seed=0)
    root = varied_replay.write_varied(
        tmp_path / "varied", old, teacher, frames=FRAMES, augment=AUGMENT
    )
    config = CacheConfig(
        policy=str(teacher), dataset=str(old), device="cpu", samples=FRAMES, augment=AUGMENT
    )
    policy = open_policy(config)
    source = open_source(config, policy, open_anchor_data(config, policy), Prompts())
    made = source.read(range(len(source))).batch
    written = open_anchor_data(CacheConfig(policy=str(teacher), dataset=str(root)), policy)
    indices = [int(line) for line in (root / varied_replay.ROWS_FILE).read_text().split()]
    found = read_rows(written, indices)
    assert len(indices) == FRAMES * (1 + AUGMENT)
    for name in ("observation.state", "observation.environment_state", "action"):
        assert torch.equal(found[name], made[name])
    # Histories that a source's episode has not are written out; what comes after it is padded.
    before = len(policy.policy.config.observation_delta_indices or (0,)) - 1
    assert torch.equal(found["action_is_pad"][:, before:], made["action_is_pad"][:, before:])
    assert not torch.equal(made["action"][FRAMES], made["action"][FRAMES + 1])


@pytest.mark.slow
def test_quick_draws_the_picture(
    run_metaworld: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = importlib.import_module("arms").GROUPS
    some = ("plain fine-tuning", "16 frames: as they are", "16 frames: replay, varied")
    for group in ("few", "varied"):
        monkeypatch.setitem(groups, group, [arm for arm in groups[group] if arm["name"] in some])
    run_metaworld("run.py", "--groups", "few,varied")
    text = (tmp_path / "tables.md").read_text()
    assert "| 16 frames: replay, varied | 1 |" in text
    assert (tmp_path / "pick-act-few.png").stat().st_size > 10_000
