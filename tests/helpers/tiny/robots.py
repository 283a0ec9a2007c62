"""Small real datasets of robots with any numbers and cameras."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from numpy.typing import NDArray

from tiny.world import TASKS

type Vectors = Mapping[str, NDArray[Any]]
"""The vectors of all frames by name, [frames, size]."""


def write_robot_data(
    root: Path, vectors: Vectors, *, cameras: Sequence[str] = (), px: int = 32, seed: int = 0
) -> Path:
    """A LeRobotDataset of one episode with these vectors and random pictures."""
    features: dict[str, dict[str, Any]] = {
        camera: {"dtype": "image", "shape": (px, px, 3), "names": ["height", "width", "channels"]}
        for camera in cameras
    }
    for name, values in vectors.items():
        features[name] = {"dtype": "float32", "shape": values.shape[1:], "names": None}
    data = LeRobotDataset.create(
        f"robots/{root.name}", fps=10, features=features, root=root, use_videos=False
    )
    rng = np.random.default_rng(seed)
    for frame in range(len(next(iter(vectors.values())))):
        row: dict[str, Any] = {
            name: values[frame].astype(np.float32) for name, values in vectors.items()
        }
        for camera in cameras:
            row[camera] = rng.integers(0, 256, (px, px, 3), dtype=np.uint8)
        data.add_frame({**row, "task": TASKS[0]})
    data.save_episode()
    data.finalize()
    shutil.rmtree(root / "images", ignore_errors=True)
    return root


def spread(
    frames: int, size: int, *, centre: float = 0.0, width: float = 1.0, seed: int = 0
) -> NDArray[Any]:
    """Vectors spread evenly around a centre."""
    rng = np.random.default_rng(seed)
    return centre + width * rng.uniform(-1, 1, (frames, size))
