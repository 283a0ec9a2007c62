"""The demo's world: a camera sees a 3x3 board with coloured blocks and a hand that moves over them.

An instruction names one block. An episode succeeds if the hand rests on that block at the end.
Positions are coarse and images small: a policy of half a million parameters learns it in minutes.
"""

from dataclasses import dataclass
from typing import Any, override

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

BOARD = 3
CELL_PX = 16
IMAGE_PX = BOARD * CELL_PX
EPISODE_STEPS = 6

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 48, 49),
    "green": (46, 160, 67),
    "yellow": (241, 196, 15),
    "blue": (41, 98, 255),
}
OLD_COLOURS = ("red", "green", "yellow")
NEW_COLOURS = ("blue",)


def instruction(colour: str) -> str:
    """The instruction to reach the block of that colour."""
    return f"reach the {colour} block"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The positions of the blocks and the hand; cells are (column, row)."""

    blocks: dict[str, tuple[int, int]]
    hand: tuple[int, int]


def sample_scene(rng: np.random.Generator) -> Scene:
    """A random scene: one block of each colour and the hand, no two on the same cell."""
    cells = rng.permutation(BOARD * BOARD)[: len(COLOURS) + 1]
    places = [(int(c) % BOARD, int(c) // BOARD) for c in cells]
    return Scene(blocks=dict(zip(COLOURS, places[:-1], strict=True)), hand=places[-1])


def _paint_hand() -> NDArray[np.bool_]:
    centre = (CELL_PX - 1) / 2
    y, x = np.mgrid[:CELL_PX, :CELL_PX]
    radius = np.hypot(x - centre, y - centre)
    return np.asarray((radius < 5.5) & (radius > 2.5))


_HAND = _paint_hand()


def render(scene: Scene) -> NDArray[np.uint8]:
    """The camera's image, [48, 48, 3] uint8."""
    image = np.full((IMAGE_PX, IMAGE_PX, 3), 236, dtype=np.uint8)
    image[::CELL_PX] = image[:, ::CELL_PX] = 200
    for colour, (column, row) in scene.blocks.items():
        top, left = row * CELL_PX + 2, column * CELL_PX + 2
        image[top : top + CELL_PX - 3, left : left + CELL_PX - 3] = COLOURS[colour]
    column, row = scene.hand
    cell = image[row * CELL_PX : (row + 1) * CELL_PX, column * CELL_PX : (column + 1) * CELL_PX]
    cell[_HAND] = 20
    return image


def expert_action(scene: Scene, colour: str) -> NDArray[np.float32]:
    """One step towards the block, diagonal while both axes differ; zero once it is reached."""
    target = np.asarray(scene.blocks[colour])
    return np.asarray(np.sign(target - np.asarray(scene.hand)), dtype=np.float32)


def move(scene: Scene, action: NDArray[np.float32]) -> Scene:
    """Move the hand by at most one cell along each axis; it stays on the board."""
    step = np.rint(np.clip(np.nan_to_num(action), -1, 1)).astype(int)
    column, row = np.clip(np.asarray(scene.hand) + step, 0, BOARD - 1)
    return Scene(blocks=scene.blocks, hand=(int(column), int(row)))


class BlockWorld(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """The board as a Gymnasium environment.

    An observation is the image and the hand's position; an action moves the hand by up to a cell.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012  # gymnasium declares it so

    def __init__(self, colour: str) -> None:
        self.colour = colour
        self.task = instruction(colour)
        self.observation_space = gym.spaces.Dict(
            {
                "pixels": gym.spaces.Box(0, 255, (IMAGE_PX, IMAGE_PX, 3), np.uint8),
                "agent_pos": gym.spaces.Box(0, BOARD - 1, (2,), np.float32),
            }
        )
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.scene = sample_scene(self.np_random)
        self._steps = 0
        return self._observation(), self._info()

    @override
    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.scene = move(self.scene, action)
        self._steps += 1
        over = self._steps >= EPISODE_STEPS
        info = self._info()
        return self._observation(), float(over and info["is_success"]), over, False, info

    @override
    def render(self) -> NDArray[np.uint8]:
        return render(self.scene)

    def _observation(self) -> dict[str, Any]:
        return {
            "pixels": render(self.scene),
            "agent_pos": np.asarray(self.scene.hand, dtype=np.float32),
        }

    def _info(self) -> dict[str, Any]:
        return {"is_success": self.scene.hand == self.scene.blocks[self.colour]}
