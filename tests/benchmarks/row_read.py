"""Reading rows of a LeRobotDataset: numbers from its table, over LeRobot's own way.

    uv run python tests/benchmarks/row_read.py

States and a chunk of actions, no images: what is left of an item when its frames are decoded
elsewhere. Both in one process, alternating, median of the ratios.
"""

import os
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

import numpy as np
import typer
from table import Row, row_of

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from lerobot.datasets.lerobot_dataset import LeRobotDataset

from craftcli.policies.lerobot.fast_rows import FastRows

FPS, STATE, ACTION, CHUNK = 50, 39, 4, 16


def write(root: Path, episodes: int, frames: int) -> None:
    """A dataset of random states and actions."""
    sizes = {"observation.state": STATE, "observation.environment_state": STATE, "action": ACTION}
    features = {n: {"dtype": "float32", "shape": (s,), "names": None} for n, s in sizes.items()}
    data = LeRobotDataset.create("bench/rows", FPS, features=features, root=root, use_videos=False)
    rng = np.random.default_rng(0)
    for _ in range(episodes):
        for _ in range(frames):
            values = {n: rng.normal(size=s).astype("float32") for n, s in sizes.items()}
            data.add_frame({**values, "task": "push"})
        data.save_episode()
    data.finalize()


def milliseconds(data: LeRobotDataset, rows: list[int]) -> float:
    """For a row, read one after the other."""
    begin = time.perf_counter()
    for row in rows:
        data[row]
    return (time.perf_counter() - begin) / len(rows) * 1e3


def measure(episodes: int, frames: int, count: int, rounds: int) -> list[tuple[float, float]]:
    """Milliseconds for a row by LeRobot and from the table, in each round."""
    times = {"action": [step / FPS for step in range(CHUNK)]}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "rows"
        write(root, episodes, frames)
        theirs, ours = (
            LeRobotDataset("bench/rows", root=root, delta_timestamps=times) for _ in range(2)
        )
        FastRows.install(ours)
        rng = np.random.default_rng(1)
        measured = []
        for _ in range(rounds):
            chosen = rng.integers(len(theirs), size=count).tolist()
            measured.append((milliseconds(theirs, chosen), milliseconds(ours, chosen)))
    return measured


def rows(*, quick: bool) -> list[Row]:
    """Reading numbers from the table over LeRobot's own way."""
    measured = measure(2, 20, 20, 2) if quick else measure(20, 100, 300, 5)
    ratios = [ours / theirs for theirs, ours in measured]
    return [row_of("rows: numbers from the table / through LeRobot", "wall clock", ratios)]


def main(episodes: int = 20, frames: int = 100, rows: int = 300, rounds: int = 5) -> None:
    """Print milliseconds for a row both ways, and their ratio."""
    measured = measure(episodes, frames, rows, rounds)
    slow, fast = (median(values) for values in zip(*measured, strict=True))
    ratio = median(one / other for one, other in measured)
    print(f"{date.today()}, {os.cpu_count()} cores, {rows} rows, chunks of {CHUNK}")
    print(f"LeRobot {slow:.2f} ms a row, from the table {fast:.2f} ms: {ratio:.1f}x")


if __name__ == "__main__":
    typer.run(main)
