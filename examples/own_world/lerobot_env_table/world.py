"""A table with a red and a blue block; a lamp says which of them the hand is to touch."""

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

TASKS = {"red": "touch the red block", "blue": "touch the blue block"}
COLOURS = {"red": (214, 48, 49), "blue": (41, 98, 255)}
FPS = 10
EPISODE_STEPS = 40
SPEED = 0.15
"""The farthest that the hand moves in a step along each axis; the table is 2 wide."""
NEAR = 0.1
"""The hand touches a block from this distance on."""
PX = 64


class TableWorld(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """The table as a Gymnasium environment, with the names of observations that LeRobot expects.

    `agent_pos` is the hand. `environment_state` is the way to the red block, the way to the blue
    block, and the lamp, which is 0 for red and 1 for blue. An action moves the hand.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": FPS}  # noqa: RUF012  # Gymnasium's way

    def __init__(self, task: str, render_mode: str = "rgb_array") -> None:
        self.task, self.task_description = task, TASKS[task]
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Dict(
            {
                "agent_pos": gym.spaces.Box(-1, 1, (2,), np.float32),
                "environment_state": gym.spaces.Box(-2, 2, (5,), np.float32),
            }
        )
        self.action_space = gym.spaces.Box(-SPEED, SPEED, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Put the hand and both blocks anywhere."""
        super().reset(seed=seed)
        self._hand, red, blue = self.np_random.uniform(-0.9, 0.9, (3, 2))
        self._blocks = {"red": red, "blue": blue}
        return self.observation(), {"is_success": self._touches()}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Move the hand; the episode ends when it touches the block."""
        self._hand = np.clip(self._hand + np.clip(action, -SPEED, SPEED), -1, 1)
        success = self._touches()
        return self.observation(), float(success), success, False, {"is_success": success}

    def expert_action(self) -> NDArray[np.float32]:
        """The move towards the block of the task."""
        way = np.clip(self._blocks[self.task] - self._hand, -SPEED, SPEED)
        return np.asarray(way, dtype=np.float32)

    def observation(self) -> dict[str, NDArray[np.float32]]:
        """What the robot knows."""
        ways = [self._blocks[name] - self._hand for name in TASKS]
        seen = np.concatenate([*ways, [self.task == "blue"]])
        return {
            "agent_pos": self._hand.astype(np.float32),
            "environment_state": seen.astype(np.float32),
        }

    def render(self) -> NDArray[np.uint8]:
        """The table from above, for LeRobot's videos."""
        image = np.full((PX, PX, 3), 236, dtype=np.uint8)
        for place, colour in (
            *((self._blocks[name], COLOURS[name]) for name in COLOURS),
            (self._hand, (20, 20, 20)),
        ):
            x, y = np.rint((place + 1) / 2 * (PX - 5)).astype(int)
            image[y : y + 4, x : x + 4] = colour
        return image

    def _touches(self) -> bool:
        return bool(np.linalg.norm(self._blocks[self.task] - self._hand) < NEAR)


for name in TASKS:
    gym.register(
        f"lerobot_env_table/{name}",
        entry_point=TableWorld,
        max_episode_steps=EPISODE_STEPS,
        kwargs={"task": name},
    )
