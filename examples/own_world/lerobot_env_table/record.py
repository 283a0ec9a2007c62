"""Records an expert on each task as a LeRobotDataset.

python -m lerobot_env_table.record data
"""

import argparse
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from lerobot_env_table.world import FPS, TASKS, TableWorld

EPISODES = 100

FEATURES: dict[str, dict[str, Any]] = {
    "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    "observation.environment_state": {
        "dtype": "float32",
        "shape": (5,),
        "names": ["red_x", "red_y", "blue_x", "blue_y", "lamp"],
    },
    "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
}


def record(task: str, root: Path, episodes: int) -> Path:
    """Write a dataset of one task; an episode ends when the hand touches the block."""
    data = LeRobotDataset.create(
        f"table/{task}", fps=FPS, features=FEATURES, root=root, use_videos=False
    )
    world = TableWorld(task)
    for episode in range(episodes):
        world.reset(seed=episode)
        touched = False
        while not touched:
            seen, action = world.observation(), world.expert_action()
            data.add_frame(
                {
                    "observation.state": seen["agent_pos"],
                    "observation.environment_state": seen["environment_state"],
                    "action": action,
                    "task": TASKS[task],
                }
            )
            _, _, touched, _, _ = world.step(action)
        data.save_episode()
    data.finalize()
    return root


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, default=EPISODES)
    options = parser.parse_args()
    disable_progress_bars()
    for name in TASKS:
        folder = record(name, options.folder / name, options.episodes)
        print(f"Recorded {options.episodes} episodes in {folder}")
