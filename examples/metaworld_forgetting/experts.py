"""Datasets of Meta-World's scripted experts, written as LeRobotDatasets."""

import itertools
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import metaworld.policies
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from numpy.typing import NDArray
from views import ACTION, ACTION_SIZE, STATE, VECTORS, View

from craftcli.evaluation.simulators.base import Simulation

FPS = 80
"""Meta-World simulates 12.5 ms an action."""
LONGEST = 200
AFTER_SUCCESS = 10
"""Frames that are kept after success, so that the policy sees where to stay."""
NOISE = 0.1
"""Standard deviation of what is added to the expert's actions; labels are without it."""
FIRST_SEED = 100_000
"""Scenes of demonstrations begin here, far from those of evaluation."""
EXPERT_FILE = "expert.json"
"""In the folder of a dataset: by task, in which share of the scenes its expert succeeded."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What was seen and what the expert would do."""

    seen: dict[str, Any]
    action: NDArray[np.float32]


def write_dataset(
    root: Path, tasks: tuple[str, ...], *, episodes: int, view: View | None = None
) -> Path:
    """Record successful episodes of every task, whole or not at all; a dataset there is kept."""
    if root.is_dir():
        return root
    view = view or View()
    partial = root.with_name(f".{root.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    dataset = create_dataset(root.name, partial, view.vectors)
    rates = {}
    for task in tasks:
        attempts = demonstrations(task, view)
        for number in range(episodes):
            tried, frames = next(found for found in attempts if found[1] is not None)
            rates[task] = (number + 1) / tried
            for frame in frames:
                dataset.add_frame({**frame.seen, ACTION: frame.action})
            dataset.save_episode()
    dataset.finalize()
    (partial / EXPERT_FILE).write_text(json.dumps(rates), "utf-8")
    partial.rename(root)
    return root


def create_dataset(name: str, root: Path, vectors: Mapping[str, int] = VECTORS) -> LeRobotDataset:
    """An empty dataset of states and actions, to be filled."""
    features = {
        name: {"dtype": "float32", "shape": (size,), "names": None}
        for name, size in {**vectors, ACTION: ACTION_SIZE}.items()
    }
    return LeRobotDataset.create(
        f"metaworld/{name}", fps=FPS, features=features, root=root, use_videos=False
    )


def demonstrations(task: str, view: View) -> Iterator[tuple[int, list[Frame] | None]]:
    """The expert's episodes, in scenes of their own, counted from 1; None if it fails."""
    world = view.worlds(task)()
    expert = _expert(task)
    for tried in itertools.count(1):
        yield tried, _episode(world, expert, FIRST_SEED + tried - 1)


def _episode(world: Simulation, expert: Any, seed: int) -> list[Frame] | None:
    noise = np.random.default_rng(seed)
    now = world.reset(seed)
    frames: list[Frame] = []
    last = LONGEST
    while now.observation is not None and len(frames) < last:
        # Experts write into what they are given.
        state = now.observation[STATE].astype(np.float64)
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
