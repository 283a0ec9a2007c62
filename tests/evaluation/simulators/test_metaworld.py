"""Meta-World with states alone: the real simulator, and a real ACT in it."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_pre_post_processors
from metaworld.policies import SawyerReachV3Policy

from craftcli.cache.build.build import build_cache
from craftcli.cache.reading.reader import CacheReader
from craftcli.config.cache import CacheConfig
from craftcli.errors import CraftError
from craftcli.evaluation.cache_check import rerun_teacher
from craftcli.evaluation.recording import record
from craftcli.evaluation.rollouts import rollout
from craftcli.evaluation.simulators.by_name import open_environments
from craftcli.evaluation.simulators.metaworld import MetaWorld
from craftcli.policies.families.registry import adapter_for
from craftcli.policies.lerobot.checkpoint import Checkpoint

STATE, ENV = "observation.state", "observation.environment_state"


@pytest.fixture(scope="module")
def reach() -> MetaWorld:
    return MetaWorld("reach-v3", instruction="reach", vectors={ENV: 39, STATE: 4})


def act(folder: Path, *, state: int = 4) -> Checkpoint:
    sizes = {STATE: (FeatureType.STATE, state), ENV: (FeatureType.ENV, 39)}
    torch.manual_seed(0)
    config = ACTConfig(
        device="cpu",
        input_features={key: PolicyFeature(kind, (size,)) for key, (kind, size) in sizes.items()},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (4,))},
        chunk_size=4,
        n_action_steps=4,
        dim_model=32,
        n_heads=4,
        dim_feedforward=64,
        use_vae=False,
    )
    lengths = {STATE: state, ENV: 39, "action": 4}
    stats = {key: {"mean": torch.zeros(n), "std": torch.ones(n)} for key, n in lengths.items()}
    preprocess, postprocess = make_pre_post_processors(config, dataset_stats=stats)
    return Checkpoint(
        policy=ACTPolicy(config),
        preprocess=preprocess,
        postprocess=postprocess,
        adapter=adapter_for("act"),
        folder=folder,
        source=str(folder),
        revision=None,
    )


def seen(moment: Any) -> Any:
    return moment.observation[ENV]


def test_an_episode_is_a_function_of_its_seed(reach: MetaWorld) -> None:
    first, other = seen(reach.reset(5)), seen(reach.reset(6))
    push = np.full(4, 0.5, dtype=np.float32)
    after = [seen(reach.step(push)) for _ in range(3)][-1]
    assert first.dtype == np.float32
    # Objects and the goal, which is the end of the state, are somewhere else.
    assert not np.array_equal(first[4:7], other[4:7])
    assert not np.array_equal(first[-3:], other[-3:])
    assert np.any(first[-3:])
    assert np.array_equal(seen(reach.reset(5)), first)
    reach.reset(6)
    assert np.array_equal([seen(reach.step(push)) for _ in range(3)][-1], after)
    again = reach.reset(5).observation
    assert again is not None
    assert np.array_equal(again[STATE], first[:4])


def test_the_scripted_expert_succeeds(reach: MetaWorld) -> None:
    expert, moment = SawyerReachV3Policy(), reach.reset(7)
    with warnings.catch_warnings():
        # The experts say of their own gains that they are high.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(100):
            moment = reach.step(expert.get_action(seen(moment).astype(np.float64)))
            if moment.over:
                break
    assert moment.success


def test_a_policy_is_rolled_out_the_same_twice(tmp_path: Path) -> None:
    checkpoint = act(tmp_path)
    (reach,) = open_environments("metaworld:reach-v3", checkpoint.policy.config, max_steps=6)
    success = rollout(checkpoint, reach, episodes=3, batch_size=2)
    assert [episode.steps for episode in success.episodes] == [6, 6, 6]
    assert not success.crashed
    assert rollout(checkpoint, reach, episodes=3, batch_size=2) == success


def test_a_policy_of_another_robot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CraftError, match="the policy reads 7"):
        open_environments("metaworld:reach-v3", act(tmp_path, state=7).policy.config)


@pytest.mark.slow
def test_what_a_policy_sees_becomes_anchors(tmp_path: Path) -> None:
    """States of the teacher's own episodes: no dataset is read, and L_ret is 0 on them."""
    checkpoint = act(tmp_path)
    checkpoint.policy.save_pretrained(tmp_path)
    found = open_environments("metaworld:reach-v3", checkpoint.policy.config, max_steps=12)
    recording = record(checkpoint, found, episodes=3, samples=32)
    assert recording.frames_seen == 36
    config = CacheConfig(
        policy=str(tmp_path),
        env="metaworld:reach-v3",
        samples=32,
        device="cpu",
        output=tmp_path / "a.zarr",
    )
    build_cache(
        config, checkpoint, recording.recorded, on_plan=lambda _: None, on_rows=lambda _: None
    )
    reader = CacheReader.open(tmp_path / "a.zarr")
    frame = recording.recorded.frames[5]
    stored = reader.read(f"inputs/{ENV}", np.array([5]))[0]
    np.testing.assert_allclose(stored, frame.observation[ENV], rtol=1e-5, atol=1e-6)
    checks = rerun_teacher(reader, checkpoint, range(32))
    assert all(check.passed for check in checks)
