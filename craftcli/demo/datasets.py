"""The demo's datasets: real LeRobotDatasets of the scripted expert, written on first use."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from craftcli.demo.world import (
    BOARD,
    IMAGE_PX,
    NEW_COLOURS,
    OLD_COLOURS,
    expert_action,
    instruction,
    move,
    render,
    sample_scene,
)
from craftcli.errors import CraftError
from craftcli.whole_files import whole_folder

CAMERA = "observation.images.top"
FPS = 5
FRAMES = 4
"""Frames in an episode: at most two moves, then the hand rests."""
VERSION = 1
"""Raise it when the content changes, so that older copies in the cache folder are not used."""

FEATURES: dict[str, dict[str, Any]] = {
    CAMERA: {
        "dtype": "image",
        "shape": (IMAGE_PX, IMAGE_PX, 3),
        "names": ["height", "width", "channels"],
    },
    "observation.state": {"dtype": "float32", "shape": (2,), "names": ["column", "row"]},
    "action": {"dtype": "float32", "shape": (2,), "names": ["columns", "rows"]},
}


@dataclass(frozen=True, kw_only=True)
class DemoDataset:
    """One of the demo's two datasets: its name, the blocks it reaches for, and its size."""

    repo_id: str
    colours: tuple[str, ...]
    episodes: int
    seed: int


OLD = DemoDataset(repo_id="craft-demo/old", colours=OLD_COLOURS, episodes=180, seed=1)
NEW = DemoDataset(repo_id="craft-demo/new", colours=NEW_COLOURS, episodes=120, seed=2)


def demo_stats() -> dict[str, dict[str, torch.Tensor]]:
    """The range of positions and moves, for the policy's normaliser."""
    return {
        "observation.state": {"min": torch.zeros(2), "max": torch.full((2,), BOARD - 1.0)},
        "action": {"min": -torch.ones(2), "max": torch.ones(2)},
    }


def demo_home() -> Path:
    """The folder of the demo's datasets: $CRAFT_HOME, or `craft` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CRAFT_HOME") or Path(cache) / "craft")


def demo_root(which: DemoDataset) -> Path:
    """The folder of one of the demo's datasets; it may not exist yet."""
    return demo_home() / f"demo-v{VERSION}" / which.repo_id.rpartition("/")[2]


def ensure_dataset(which: DemoDataset) -> Path:
    """Write the dataset, whole or not at all, unless it exists. Returns its folder."""
    root = demo_root(which)
    if root.is_dir():
        return root
    try:
        # LeRobot's writer refuses a folder that exists.
        with whole_folder(root, create=False) as fresh:
            write_dataset(which, fresh)
    except OSError as error:
        if not root.is_dir():
            raise CraftError(
                f"Cannot write the demo's data to {root}.",
                why=f"{error.strerror or error}.",
                fix="set CRAFT_HOME to a folder that you may write to.",
            ) from error
        # Another process was faster: its copy has the same content.
    return root


def write_dataset(which: DemoDataset, root: Path) -> None:
    """Record the expert's episodes with LeRobot's own writer."""
    dataset = LeRobotDataset.create(
        which.repo_id, fps=FPS, features=FEATURES, root=root, use_videos=False
    )
    rng = np.random.default_rng(which.seed)
    for episode in range(which.episodes):
        colour = which.colours[episode % len(which.colours)]
        scene = sample_scene(rng)
        for _ in range(FRAMES):
            action = expert_action(scene, colour)
            dataset.add_frame(
                {
                    CAMERA: render(scene),
                    "observation.state": np.asarray(scene.hand, dtype=np.float32),
                    "action": action,
                    "task": instruction(colour),
                }
            )
            scene = move(scene, action)
        dataset.save_episode()
    dataset.finalize()
    # LeRobot's recorder leaves loose image files behind that are already packed into parquet.
    shutil.rmtree(root / "images", ignore_errors=True)
