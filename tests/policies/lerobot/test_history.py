"""A policy with an observation history gets the same one from a dataset as from a rollout."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES
from tiny.family import Family
from tiny.world import write_dataset

from craftcli.cache.build.build import build_cache
from craftcli.cache.reading.reader import CacheReader
from craftcli.config.cache import CacheConfig
from craftcli.errors import CraftError
from craftcli.evaluation.action_error import compare_actions
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset
from craftcli.policies.lerobot.history import observation_queues, recall
from craftcli.sources import open_anchor_data, open_policy, open_teacher

REMEMBERING = [f for f in FAMILIES if f.name in ("diffusion", "vqbet", "multi_task_dit")]
families = pytest.mark.parametrize("family", REMEMBERING, ids=lambda family: family.name)
FRAME = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("history") / "data")


def alone(observed: dict[str, Any], step: int) -> dict[str, Any]:
    """One step of a history, as an environment would give it."""
    return {
        key: value[:, step] if key.startswith("observation.") and value.ndim > 2 else value
        for key, value in observed.items()
        if key != "action"
    }


@families
def test_the_queues_are_those_of_a_rollout(family: Family, data: Path, tmp_path: Path) -> None:
    opened = load_checkpoint(str(family.make(tmp_path / family.name)), device="cpu")
    policy = opened.policy.eval()
    dataset = open_dataset("tiny/world", root=str(data), policy_config=policy.config)
    batch = opened.preprocess(read_rows(dataset, [FRAME]))
    policy.reset()
    for step in range(policy.config.n_obs_steps):
        policy.select_action(alone(batch, step))
    lived = {key: list(queue) for key, queue in observation_queues(policy).items()}
    assert lived
    policy.reset()
    recall(policy, batch)
    for key, queue in lived.items():
        assert len(queue) == policy.config.n_obs_steps
        for one, other in itertools.zip_longest(queue, observation_queues(policy)[key]):
            assert torch.equal(one, other)


@families
def test_its_actions_are_compared_with_its_teachers(
    family: Family, data: Path, tmp_path: Path
) -> None:
    folder = family.make(tmp_path / family.name)
    config = CacheConfig(
        policy=str(folder), dataset=str(data), samples=4, kind="hidden", output=tmp_path / "a.zarr"
    )
    student = open_policy(config)
    build_cache(
        config,
        student,
        open_anchor_data(config, student),
        on_plan=lambda _: None,
        on_rows=lambda _: None,
    )
    reader = CacheReader.open(tmp_path / "a.zarr")
    teacher = open_teacher(reader.manifest, device="cpu", named=str(folder))
    assert compare_actions(student, teacher, reader, seed=0, batch_size=4).value == 0
    with torch.no_grad():
        for parameter in student.policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert compare_actions(student, teacher, reader, seed=0, batch_size=4).value > 0


def test_a_missing_history_is_an_error(data: Path, tmp_path: Path) -> None:
    opened = load_checkpoint(str(REMEMBERING[0].make(tmp_path / "policy")), device="cpu")
    with pytest.raises(CraftError, match="Cannot fill the policy's history"):
        recall(opened.policy, {})
