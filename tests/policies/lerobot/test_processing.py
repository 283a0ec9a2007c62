"""Cache and training keep the work of a checkpoint's processors: relative actions, cameras."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
from tiny import pi05, smolvla
from tiny.paligemma import save_with_words
from tiny.world import ACTIONS, CAMERAS, save, write_dataset

from craftcli.cache.build.build import build_cache
from craftcli.choices import Images, LossKind
from craftcli.config.cache import CacheConfig
from craftcli.config.train import TrainConfig
from craftcli.engine.retention.gradient_reach import find_reach, require_reach
from craftcli.engine.retention.imitation import Imitation
from craftcli.engine.retention.retention import open_retention
from craftcli.errors import CraftError
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")


def built(policy: Checkpoint, data: Path, cache: Path, **settings: Any) -> Path:
    config = CacheConfig(output=cache, samples=6, images=Images.EMBED, device="cpu", **settings)
    dataset = open_dataset(str(data), root=None, policy_config=policy.policy.config)
    build_cache(config, policy, dataset, on_plan=lambda _: None, on_rows=lambda _: None)
    return cache


def test_relative_actions_stay_relative(data: Path, tmp_path: Path) -> None:
    made = pi05.policy(use_relative_actions=True)
    save_with_words(tmp_path / "policy", made, make_pi05_pre_post_processors)
    opened = load_checkpoint(str(tmp_path / "policy"), device="cpu")
    dataset = open_dataset(str(data), root=None, policy_config=opened.policy.config)
    raw = read_rows(dataset, [0, 3])
    batch = opened.preprocess(dict(raw))
    relative = raw["action"] - raw["observation.state"][:, None, :ACTIONS]
    # Quantiles of the tiny data are -1 and 1: normalising changes nothing.
    torch.testing.assert_close(batch["action"], relative, rtol=1e-4, atol=1e-4)
    back = opened.postprocess(batch["action"])
    torch.testing.assert_close(back, raw["action"], rtol=1e-4, atol=1e-4)
    cache = built(opened, data, tmp_path / "a.zarr", kind="hidden+action")
    settings = TrainConfig(mode="hidden+action", anchor_batch_size=3, device="cpu")
    term = open_retention(settings, opened, cache).terms[0]
    assert isinstance(term, Imitation)
    for loss in term.losses(0, loss=LossKind.NMSE).values():
        assert loss.total.item() < 1e-8


def test_one_camera_of_two_is_enough_for_a_policy_that_can_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tiny.world.CAMERAS", CAMERAS[:1])
        one_camera = write_dataset(tmp_path / "data")
    opened = load_checkpoint(str(pi05.make(tmp_path / "policy")), device="cpu")
    cache = built(opened, one_camera, tmp_path / "a.zarr")
    settings = TrainConfig(anchor_batch_size=3, device="cpu")
    term = open_retention(settings, opened, cache).terms[0]
    assert isinstance(term, Imitation)
    assert all(loss.total.item() < 1e-8 for loss in term.losses(0).values())


def test_a_frozen_stack_is_refused(data: Path, tmp_path: Path) -> None:
    """By default smolvla trains its expert alone, and nothing before the language model's layers
    but the projection of the state."""
    vlm = smolvla.write_vlm(tmp_path / "vlm")
    save(tmp_path / "policy", smolvla.policy(vlm, train_state_proj=False))
    opened = load_checkpoint(str(tmp_path / "policy"), device="cpu")
    cache = built(opened, data, tmp_path / "a.zarr", kind="hidden", stack="vlm")
    settings = TrainConfig(mode="hidden", anchor_batch_size=3, device="cpu")
    retention = open_retention(settings, opened, cache)
    dataset = open_dataset(str(data), root=None, policy_config=opened.policy.config)
    batch = opened.preprocess(read_rows(dataset, [0, 1]))
    reach = find_reach(opened.policy, opened.adapter, retention.terms, batch)
    with pytest.raises(CraftError, match=r"Retention would do nothing.*reaches none"):
        require_reach(reach)
