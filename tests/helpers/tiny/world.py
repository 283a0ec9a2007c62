"""What the tiny policies see: one small real dataset, its statistics, and how a policy is saved."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import make_pre_post_processors

CAMERAS = ("observation.images.front", "observation.images.wrist")
DEPTH, _IS_DEPTH = "observation.images.depth", {"is_depth_map": True}
PX, STATE, ENV, ACTIONS = 64, 4, 3, 3
EPISODES, FRAMES = 2, 8
SEED = 5

_VECTORS = {
    "observation.state": STATE,
    "observation.environment_state": ENV,
    "action": ACTIONS,
}
TASKS = ("push the red block", "lift the blue cup up")


def write_dataset(
    root: Path,
    *,
    seed: int = SEED,
    videos: bool = False,
    depth: bool = False,
    px: int = PX,
    frames: int = FRAMES,
) -> Path:
    """A LeRobotDataset of two cameras, both kinds of state, actions and two tasks.

    `depth` adds a camera of depth, which no policy here reads; `frames` are those of an episode.
    """
    dtype = "video" if videos else "image"
    features: dict[str, dict[str, Any]] = {
        camera: {"dtype": dtype, "shape": (px, px, 3), "names": ["height", "width", "channels"]}
        for camera in CAMERAS
    }
    if depth:
        features[DEPTH] = {**features[CAMERAS[0]], "shape": (px, px, 1), "info": _IS_DEPTH}
    for name, size in _VECTORS.items():
        names = [f"{name}_{i}" for i in range(size)]
        features[name] = {"dtype": "float32", "shape": (size,), "names": names}
    dataset = LeRobotDataset.create(
        "tiny/world", fps=10, features=features, root=root, use_videos=videos
    )
    rng = np.random.default_rng(seed)
    for episode in range(EPISODES):
        for _ in range(frames):
            frame: dict[str, Any] = {
                name: rng.uniform(-1, 1, size).astype(np.float32) for name, size in _VECTORS.items()
            }
            for camera in CAMERAS:
                frame[camera] = rng.integers(0, 256, (px, px, 3), dtype=np.uint8)
            if depth:
                frame[DEPTH] = rng.integers(200, 4000, (px, px, 1), dtype=np.uint16)
            dataset.add_frame({**frame, "task": TASKS[episode % len(TASKS)]})
        dataset.save_episode()
    dataset.finalize()
    shutil.rmtree(root / "images", ignore_errors=True)
    return root


def input_features(*, cameras: int, px: int = PX, env: bool = False) -> dict[str, PolicyFeature]:
    """The inputs of a policy: so many cameras, the robot's state, and maybe the environment's."""
    inputs = {
        camera: PolicyFeature(type=FeatureType.VISUAL, shape=(3, px, px))
        for camera in CAMERAS[:cameras]
    }
    inputs["observation.state"] = PolicyFeature(type=FeatureType.STATE, shape=(STATE,))
    if env:
        inputs["observation.environment_state"] = PolicyFeature(type=FeatureType.ENV, shape=(ENV,))
    return inputs


def output_features() -> dict[str, PolicyFeature]:
    """The outputs of a policy."""
    return {"action": PolicyFeature(type=FeatureType.ACTION, shape=(ACTIONS,))}


def stats() -> dict[str, dict[str, torch.Tensor]]:
    """Statistics of numbers spread evenly over -1..1, and of pixels over 0..1."""
    vectors = {
        name: {
            "mean": torch.zeros(size),
            "std": torch.full((size,), 0.6),
            "min": -torch.ones(size),
            "max": torch.ones(size),
        }
        for name, size in _VECTORS.items()
    }
    images = {
        camera: {
            "mean": torch.full((3, 1, 1), 0.5),
            "std": torch.full((3, 1, 1), 0.3),
            "min": torch.zeros(3, 1, 1),
            "max": torch.ones(3, 1, 1),
        }
        for camera in CAMERAS
    }
    return vectors | images


def save(folder: Path, policy: Any) -> Path:
    """Write policy and processors as LeRobot's own training does."""
    policy.save_pretrained(folder)
    for processor in make_pre_post_processors(policy.config, dataset_stats=stats()):
        processor.save_pretrained(folder)
    return folder
