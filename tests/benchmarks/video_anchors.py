"""What an anchor costs whose image is a frame of a video, at a random position.

    uv run python tests/benchmarks/video_anchors.py
    uv run python tests/benchmarks/video_anchors.py --quick

A cache refers to the images of its anchors. Two LeRobotDatasets hold the same frames of one camera,
as videos (LeRobot's own encoder) and as images. Frames are read at random, as anchors are, from
both in turn. A thread reads ahead of the steps, so that a step waits only if it is shorter than the
reading of its anchors: an eighth as many as it has samples.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from table import Row, row_of, where

from craftcli.policies.lerobot.batches import read_rows

CAMERA = "observation.images.top"


def write(root: Path, *, videos: bool, episodes: int, frames: int, height: int) -> Any:
    """A dataset of a moving picture, opened again."""
    shape = (height, height * 4 // 3, 3)
    names = ["height", "width", "channels"]
    camera = {"dtype": "video" if videos else "image", "shape": shape, "names": names}
    state = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
    features = {CAMERA: camera, "action": state}
    dataset = LeRobotDataset.create(
        "bench/video", fps=30, features=features, root=root, use_videos=videos
    )
    picture = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for episode in range(episodes):
        for frame in range(frames):
            seen = np.roll(picture, (episode * 31 + frame * 3) % shape[1], axis=1)
            dataset.add_frame({CAMERA: seen, "action": np.zeros(2, np.float32), "task": "look"})
        dataset.save_episode()
    dataset.finalize()
    shutil.rmtree(root / "images", ignore_errors=videos)
    return LeRobotDataset("bench/video", root=root)


def measure(folder: Path, *, rounds: int, **size: int) -> dict[str, list[float]]:
    """Milliseconds for one random frame, by kind of dataset, one entry a round."""
    kinds = {
        name: write(folder / name, videos=name == "video", **size) for name in ("video", "image")
    }
    draw = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        rows = [draw.randrange(len(kinds["video"])) for _ in range(4)]
        for name, dataset in kinds.items():
            started = time.perf_counter()
            read_rows(dataset, rows)
            if number:  # the first opens the files
                found[name].append((time.perf_counter() - started) / len(rows) * 1e3)
    return found


def rows(*, quick: bool) -> list[Row]:
    """A random frame of a video over a stored image."""
    return [
        row_of(f"video: a random frame of {height} lines / a stored image", "wall clock", ratios)
        for height, found in measure_all(quick=quick).items()
        for ratios in [[v / i for v, i in zip(found["video"], found["image"], strict=True)]]
    ]


def measure_all(*, quick: bool) -> dict[int, dict[str, list[float]]]:
    """What `measure` finds, by the height of the camera's picture."""
    rounds, frames = (2, 8) if quick else (30, 150)
    found = {}
    for height in (48,) if quick else (240, 480):
        with tempfile.TemporaryDirectory() as folder:
            found[height] = measure(
                Path(folder), rounds=rounds, episodes=2, frames=frames, height=height
            )
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    found = measure_all(quick=parser.parse_args().quick)
    print(where())
    print("| camera | ms a frame of a video | ms an image |")
    print("|---|---|---|")
    for height, times in found.items():
        cells = (f"{median(times[name]):.1f}" for name in ("video", "image"))
        print(f"| {height * 4 // 3} x {height} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
