"""LeRobot's environments as simulations, shown with one that needs no package of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from installed import install
from lerobot.envs import EnvConfig

from craftcli.demo.world import EPISODE_STEPS, BlockWorld, Scene, expert_action
from craftcli.errors import CraftError
from craftcli.evaluation.simulators.by_name import open_environments
from craftcli.evaluation.simulators.lerobot import lerobot_environments
from craftcli.evaluation.simulators.names import check_environment_name, metaworld_instructions
from craftcli.policies.families.registry import register_policy_plugins

WORLDS: list[BlockWorld] = []
"""Every world that LeRobot made, the last one last."""


def make_world(**settings: Any) -> BlockWorld:
    WORLDS.append(BlockWorld(**settings))
    return WORLDS[-1]


gym.register("craft_test/Blocks-v0", entry_point=make_world, max_episode_steps=EPISODE_STEPS)


@EnvConfig.register_subclass("craft_test_blocks")
@dataclass
class BlocksConfig(EnvConfig):
    task: str | None = "Blocks-v0"

    @property
    def package_name(self) -> str:
        return "craft_test"

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        return {"colour": "red"}


@pytest.fixture
def blocks(teacher: Any) -> Any:
    (environment,) = lerobot_environments("craft_test_blocks", None, teacher.policy.config)
    assert environment.name == "craft_test_blocks:Blocks-v0"
    assert environment.max_steps == EPISODE_STEPS
    simulation = environment.make()
    yield simulation
    simulation.close()


def board() -> Scene:
    """What the simulation under test looks like now."""
    return WORLDS[-1].scene


def test_it_shows_what_lerobot_shows_a_policy(blocks: Any) -> None:
    seen = blocks.reset(3).observation
    assert seen["task"] == "reach the red block"
    assert seen["observation.image"].shape == (3, 48, 48)
    assert seen["observation.state"].tolist() == list(board().hand)
    again = blocks.reset(3).observation
    assert (again["observation.image"] == seen["observation.image"]).all()


def test_success_and_failure_are_those_of_the_episode_that_ended(blocks: Any) -> None:
    blocks.reset(3)
    moment = blocks.reset(4)
    while not moment.over:
        moment = blocks.step(expert_action(board(), "red"))
    assert moment.success
    moment, steps = blocks.reset(5), 0
    away = torch.tensor(board().blocks["blue"]) - torch.tensor(board().hand)
    assert away.any()
    while not moment.over:
        moment, steps = blocks.step(expert_action(board(), "blue")), steps + 1
        assert steps <= EPISODE_STEPS
    assert steps == EPISODE_STEPS
    assert not moment.success


class CountedWorld(BlockWorld):
    """A world that takes its scenes from a list, one after the other, as LIBERO does."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.init_state_id = 0

    def reset(self, **keywords: Any) -> Any:
        self.init_state_id += 1
        return super().reset(**{**keywords, "seed": self.init_state_id % 50})


gym.register("craft_test/Counted-v0", entry_point=CountedWorld, max_episode_steps=EPISODE_STEPS)


def test_scenes_that_count_resets_follow_the_seed(teacher: Any) -> None:
    """Worlds side by side show different scenes, and the same one again for the same seed."""
    policy = teacher.policy.config
    (environment,) = lerobot_environments("craft_test_blocks", "Counted-v0", policy)
    worlds = [environment.make() for _ in range(2)]

    def state(world: Any, seed: int) -> list[float]:
        states: list[float] = world.reset(seed).observation["observation.state"].tolist()
        return states

    first, second = (state(world, 1000 + n) for n, world in enumerate(worlds))
    assert first != second
    assert first == state(worlds[1], 1000)
    for world in worlds:
        world.close()


def test_every_task_of_meta_world_has_its_words() -> None:
    assert len(metaworld_instructions()) >= 49
    assert metaworld_instructions()["reach-v3"]


PLUGIN = """
from dataclasses import dataclass
from lerobot.envs import EnvConfig

@EnvConfig.register_subclass("craft_test_plugin")
@dataclass
class PluginConfig(EnvConfig):
    task: str | None = "Blocks-v0"
    package_name = "craft_test"
    gym_kwargs = {"colour": "green"}
"""


def test_an_installed_package_adds_environments(
    teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CraftError, match="Unknown environment 'craft_test_plugin'"):
        check_environment_name("craft_test_plugin")
    install(tmp_path, "lerobot_env_craft_test")
    (tmp_path / "lerobot_env_craft_test.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Only its import shows what it registers: the early check refuses nothing, the later one does.
    check_environment_name("craft_test_plugin")
    check_environment_name("nowhere")
    register_policy_plugins.cache_clear()
    (environment,) = open_environments("craft_test_plugin", teacher.policy.config)
    assert environment.name == "craft_test_plugin:Blocks-v0"
    for refuse in (check_environment_name, lambda x: open_environments(x, teacher.policy.config)):
        with pytest.raises(CraftError, match=r"Unknown environment 'nowhere'.*craft_test_plugin"):
            refuse("nowhere")


def test_a_package_that_cannot_be_imported_adds_nothing(
    teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "lerobot_env_craft_broken")
    monkeypatch.syspath_prepend(str(tmp_path))
    register_policy_plugins.cache_clear()
    check_environment_name("craft_test_broken")
    with pytest.raises(CraftError, match="Unknown environment 'craft_test_broken'"):
        open_environments("craft_test_broken", teacher.policy.config)
