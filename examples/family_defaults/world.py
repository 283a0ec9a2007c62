"""The data: a hand and a block on a board, in the shapes that the tiny policies take.

Old: reach the red block. New: keep away from the blue one, so that whoever learns it without being
held does the opposite of what is right on the old data. Which one is asked for shows in the tint of
the picture, the instruction and the environment's state; where things are, in the state.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from numpy.typing import NDArray
from tiny.world import CAMERAS, PX, TASKS

from craftcli.demo import datasets as demo

BOARD, FRAMES = 5, 6
_CELL = PX // BOARD
_VECTORS = {"observation.state": 4, "observation.environment_state": 3, "action": 3}


@dataclass(frozen=True, kw_only=True)
class Skill:
    """What the hand does about the block."""

    task: str
    colour: tuple[int, int, int]
    sign: int


OLD = Skill(task=TASKS[0], colour=(255, 0, 0), sign=1)
NEW = Skill(task=TASKS[1], colour=(0, 0, 255), sign=-1)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Old and new data, and held-out episodes of both."""

    old: Path
    new: Path
    old_test: Path
    new_test: Path


def write_data(folder: Path, *, cameras: int, episodes: int) -> Data:
    """All four, with that many episodes to train on and a quarter as many held out."""
    return _write(
        folder,
        lambda root, old, count, seed: write_dataset(
            root, OLD if old else NEW, cameras=cameras, episodes=count, seed=seed
        ),
        episodes,
    )


def write_demo_data(folder: Path, *, episodes: int) -> Data:
    """The same of the demo's world, for the demo's teacher, which knows three colours of four."""

    def write(root: Path, old: bool, count: int, seed: int) -> None:
        colours = (demo.OLD if old else demo.NEW).colours
        chosen = demo.DemoDataset(repo_id=root.name, colours=colours, episodes=count, seed=seed)
        demo.write_dataset(chosen, root)

    return _write(folder, write, episodes)


def _write(folder: Path, write: Callable[[Path, bool, int, int], None], episodes: int) -> Data:
    roots = {name: folder / name for name in ("old", "new", "old_test", "new_test")}
    for seed, (name, root) in enumerate(roots.items(), start=10):
        count = episodes // 4 if name.endswith("test") else episodes
        if not root.is_dir():
            # Whole or not at all: what is there is kept.
            partial = folder / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            write(partial, name.startswith("old"), count, seed)
            partial.rename(root)
    return Data(**roots)


def write_dataset(root: Path, skill: Skill, *, cameras: int, episodes: int, seed: int) -> None:
    """Record a scripted expert with LeRobot's own writer."""
    features: dict[str, dict[str, Any]] = {
        camera: {"dtype": "image", "shape": (PX, PX, 3), "names": ["height", "width", "channels"]}
        for camera in CAMERAS[:cameras]
    }
    for name, size in _VECTORS.items():
        names = [f"{name}_{i}" for i in range(size)]
        features[name] = {"dtype": "float32", "shape": (size,), "names": names}
    dataset = LeRobotDataset.create(
        root.name, fps=10, features=features, root=root, use_videos=False
    )
    rng = np.random.default_rng(seed)
    for _ in range(episodes):
        hand, block = rng.integers(BOARD, size=(2, 2))
        for _ in range(FRAMES):
            way = skill.sign * np.sign(block - hand)
            frame = _frame(hand, block, way, skill)
            frame |= dict.fromkeys(CAMERAS[:cameras], _picture(hand, block, skill))
            dataset.add_frame(frame)
            hand = np.clip(hand + way, 0, BOARD - 1)
        dataset.save_episode()
    dataset.finalize()
    # The recorder keeps the frames it has already packed into parquet as loose files.
    shutil.rmtree(root / "images", ignore_errors=True)


def _frame(
    hand: NDArray[Any], block: NDArray[Any], way: NDArray[Any], skill: Skill
) -> dict[str, Any]:
    """The moment, with the grip that closes on the block as the third part of the action."""
    grip = skill.sign * (1 if (hand == block).all() else -1)
    middle = (BOARD - 1) / 2
    vectors = {
        "observation.state": np.concatenate([hand, block]) / middle - 1,
        "observation.environment_state": np.asarray(skill.colour) / 127.5 - 1,
        "action": np.append(way, grip),
    }
    frame: dict[str, Any] = {name: v.astype(np.float32) for name, v in vectors.items()}
    return {**frame, "task": skill.task}


def _picture(hand: NDArray[Any], block: NDArray[Any], skill: Skill) -> NDArray[np.uint8]:
    picture = np.full((PX, PX, 3), 180, dtype=np.uint8)
    picture += np.asarray(skill.colour, dtype=np.uint8) // 4
    for (column, row), colour, inset in ((block, skill.colour, 0), (hand, (20, 20, 20), 4)):
        top, left = row * _CELL + inset, column * _CELL + inset
        picture[top : top + _CELL - 2 * inset, left : left + _CELL - 2 * inset] = colour
    return picture
