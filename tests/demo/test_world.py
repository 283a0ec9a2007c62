"""The demo's world and its expert."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from craftcli.demo.world import (
    BOARD,
    COLOURS,
    EPISODE_STEPS,
    IMAGE_PX,
    BlockWorld,
    Scene,
    expert_action,
    move,
    render,
    sample_scene,
)


@pytest.mark.parametrize("colour", COLOURS)
def test_the_expert_always_succeeds(colour: str) -> None:
    for seed in range(50):
        world = BlockWorld(colour)
        world.reset(seed=seed)
        for _ in range(EPISODE_STEPS):
            _, reward, over, _, info = world.step(expert_action(world.scene, colour))
        assert over
        assert reward == 1.0
        assert info["is_success"]


def test_resting_elsewhere_fails() -> None:
    world = BlockWorld("red")
    world.reset(seed=0)
    for _ in range(EPISODE_STEPS):
        _, reward, _, _, info = world.step(np.zeros(2, dtype=np.float32))
    assert reward == 0.0
    assert not info["is_success"]


def test_gymnasium_accepts_it() -> None:
    check_env(BlockWorld("red"), skip_render_check=True)


def test_the_same_seed_is_the_same_scene() -> None:
    one, two = (sample_scene(np.random.default_rng(7)) for _ in range(2))
    assert one == two
    assert one != sample_scene(np.random.default_rng(8))


def test_everything_has_a_cell_of_its_own() -> None:
    for seed in range(30):
        scene = sample_scene(np.random.default_rng(seed))
        assert len({*scene.blocks.values(), scene.hand}) == len(COLOURS) + 1


def test_the_hand_stays_on_the_board() -> None:
    scene = Scene(blocks=sample_scene(np.random.default_rng(0)).blocks, hand=(0, 0))
    assert move(scene, np.array([-1, -1], dtype=np.float32)).hand == (0, 0)
    assert move(scene, np.array([9, 0.6], dtype=np.float32)).hand == (1, 1)
    assert move(scene, np.array([np.nan, 1], dtype=np.float32)).hand == (0, 1)


def test_the_picture_shows_every_block_and_the_hand() -> None:
    scene = sample_scene(np.random.default_rng(1))
    image = render(scene)
    assert image.shape == (IMAGE_PX, IMAGE_PX, 3)
    cell = IMAGE_PX // BOARD
    for colour, (column, row) in scene.blocks.items():
        patch = image[row * cell + 3, column * cell + 3]
        assert tuple(patch) == COLOURS[colour]
    column, row = scene.hand
    inside = image[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
    assert (inside == 20).all(axis=-1).any()
