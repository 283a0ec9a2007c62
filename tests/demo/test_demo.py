"""The demo's policy is a real pi0_fast that has really learned the old task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import make_policy
from lerobot.policies.pi0_fast.modeling_pi0_fast import PI0FastPolicy
from transformers import AutoProcessor, AutoTokenizer

from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.datasets import NEW, OLD, demo_root, ensure_dataset
from craftcli.demo.tokenizers import tokenizer_folders
from craftcli.demo.train_teacher import straight_path
from craftcli.demo.world import NEW_COLOURS, OLD_COLOURS, instruction
from craftcli.errors import CraftError
from craftcli.evaluation.rollouts import rollout
from craftcli.evaluation.simulators.demo import demo_environments


def test_the_teacher_knows_the_old_task_and_not_the_new_one(teacher: Any) -> None:
    rates = {env.name: rollout(teacher, env).rate for env in demo_environments()}
    assert np.mean([rates[f"demo:{colour}"] for colour in OLD_COLOURS]) >= 0.8
    assert np.mean([rates[f"demo:{colour}"] for colour in NEW_COLOURS]) <= 0.2


def test_it_is_lerobots_own_policy_and_opens_through_make_policy(
    teacher: Any, old_data: Any
) -> None:
    assert isinstance(teacher.policy, PI0FastPolicy)
    config = PreTrainedConfig.from_pretrained(str(TEACHER_FOLDER))
    config.pretrained_path = str(TEACHER_FOLDER)
    reopened = make_policy(config, ds_meta=old_data.meta)
    for name, tensor in reopened.state_dict().items():
        assert torch.equal(tensor, teacher.policy.state_dict()[name])


def test_the_weights_are_small_enough_to_ship() -> None:
    size = sum(file.stat().st_size for file in TEACHER_FOLDER.rglob("*") if file.is_file())
    assert size <= 3 * 2**20


@pytest.mark.parametrize(("which", "colours"), [(OLD, OLD_COLOURS), (NEW, NEW_COLOURS)])
def test_datasets_are_real_and_written_once(
    teacher: Any, old_data: Any, new_data: Any, which: Any, colours: tuple[str, ...]
) -> None:
    root = ensure_dataset(which)
    stamp = (root / "meta/info.json").stat().st_mtime_ns
    assert ensure_dataset(which) == root == demo_root(which)
    assert (root / "meta/info.json").stat().st_mtime_ns == stamp
    dataset = LeRobotDataset(which.repo_id, root=root)
    assert dataset.num_episodes == which.episodes
    assert set(dataset.meta.tasks.index) == {instruction(c) for c in colours}


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from craftcli.demo import datasets

    monkeypatch.setenv("CRAFT_HOME", str(tmp_path))

    def fail(which: Any, root: Path) -> None:
        root.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(datasets, "write_dataset", fail)
    with pytest.raises(CraftError, match=r"disk full.*CRAFT_HOME"):
        ensure_dataset(OLD)
    assert list(demo_root(OLD).parent.iterdir()) == []


def test_every_path_of_the_expert_survives_the_action_tokenizer(teacher: Any) -> None:
    _, folder = tokenizer_folders(TEACHER_FOLDER)
    tokenizer = AutoProcessor.from_pretrained(folder)
    paths = np.stack([straight_path(x, y, 3) for x in range(-2, 3) for y in range(-2, 3)])
    decoded = tokenizer.decode(tokenizer(paths))
    assert (np.rint(decoded) == paths).all()


def test_the_text_tokenizer_knows_every_word_of_the_prompts(teacher: Any) -> None:
    folder, _ = tokenizer_folders(TEACHER_FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for colour in (*OLD_COLOURS, *NEW_COLOURS):
        ids = tokenizer.encode(f"Task: {instruction(colour)}, State: 0 128;\n")
        assert tokenizer.unk_token_id not in ids
        assert len(ids) <= teacher.policy.config.tokenizer_max_length
