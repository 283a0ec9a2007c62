"""Datasets of Meta-World's scripted experts, written as LeRobotDatasets."""

import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import metaworld.policies
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from numpy.typing import NDArray

from craftcli.evaluation.simulators.metaworld import STATE_SIZE, MetaWorld
from craftcli.evaluation.simulators.names import metaworld_instructions

STATE, WORLD, ACTION = "observation.state", "observation.environment_state", "action"
VECTORS = {STATE: STATE_SIZE, WORLD: STATE_SIZE}
"""The same twice: some of LeRobot's policies read only the first, others insist on the second."""
ACTION_SIZE = 4
FPS = 80
"""Meta-World simulates 12.5 ms an action."""
LONGEST = 200
AFTER_SUCCESS = 10
"""Frames that are kept after success, so that the policy sees where to stay."""
NOISE = 0.1
"""Standard deviation of what is added to the expert's actions; labels are without it."""
FIRST_SEED = 100_000
"""Scenes of demonstrations begin here, far from those of evaluation."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What was seen and what the expert would do."""

    seen: dict[str, Any]
    action: NDArray[np.float32]


def write_dataset(root: Path, tasks: tuple[str, ...], *, episodes: int) -> Path:
    """Record successful episodes of every task, whole or not at all; a dataset there is kept."""
    if root.is_dir():
        return root
    partial = root.with_name(f".{root.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    dataset = create_dataset(root.name, partial)
    for task in tasks:
        successful = demonstrations(task)
        for _ in range(episodes):
            for frame in next(successful):
                dataset.add_frame({**frame.seen, ACTION: frame.action})
            dataset.save_episode()
    dataset.finalize()
    partial.rename(root)
    return root


def create_dataset(name: str, root: Path) -> LeRobotDataset:
    """An empty dataset of states and actions, to be filled."""
    features = {
        name: {"dtype": "float32", "shape": (size,), "names": None}
        for name, size in {**VECTORS, ACTION: ACTION_SIZE}.items()
    }
    return LeRobotDataset.create(
        f"metaworld/{name}", fps=FPS, features=features, root=root, use_videos=False
    )


def demonstrations(task: str) -> Iterator[list[Frame]]:
    """The expert's successful episodes, in scenes of their own."""
    world = MetaWorld(task, instruction=metaworld_instructions()[task], vectors=VECTORS)
    expert = _expert(task)
    seed = FIRST_SEED
    while True:
        frames = _episode(world, expert, seed)
        seed += 1
        if frames is not None:
            yield frames


def _episode(world: MetaWorld, expert: Any, seed: int) -> list[Frame] | None:
    noise = np.random.default_rng(seed)
    now = world.reset(seed)
    frames: list[Frame] = []
    last = LONGEST
    while now.observation is not None and len(frames) < last:
        # Experts write into what they are given.
        state = now.observation[WORLD].astype(np.float64)
        with warnings.catch_warnings():
            # Some ask for more than an action may be, and say so every time.
            warnings.filterwarnings("ignore", message="Constant")
            action = np.clip(expert.get_action(state), -1, 1).astype(np.float32)
        frames.append(Frame(seen=now.observation, action=action))
        now = world.step(action + noise.normal(0, NOISE, ACTION_SIZE))
        if now.success and last == LONGEST:
            last = len(frames) + AFTER_SUCCESS
    return frames if last < LONGEST else None


def _expert(task: str) -> Any:
    name = "".join(part.capitalize() for part in task.removesuffix("-v3").split("-"))
    return getattr(metaworld.policies, f"Sawyer{name}V3Policy")()
