"""LeRobot's environments as simulations, shown with one that needs no package of its own."""

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import pytest
import torch
from lerobot.envs import EnvConfig

from craftcli.demo.world import EPISODE_STEPS, BlockWorld, Scene, expert_action
from craftcli.evaluation.simulators.lerobot import lerobot_environments
from craftcli.evaluation.simulators.names import metaworld_instructions

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


def test_every_task_of_meta_world_has_its_words() -> None:
    assert len(metaworld_instructions()) >= 49
    assert metaworld_instructions()["reach-v3"]
