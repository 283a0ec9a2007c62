"""A step with a live teacher beside one with a cache: what asking the teacher costs.

    uv run python tests/benchmarks/live_teacher.py

The demo's policy (it decodes actions token by token, which is the expensive case for a teacher that
is shown its own actions) and a policy on states. Steps with a cache and with a live teacher are
taken in turn, in one process; the processor time of a step, and the median of the ratios. A live
teacher needs no build before the first step.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sys

import typer
from table import Row, row_of

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from craftcli.choices import Teacher
from craftcli.config.train import TrainConfig
from craftcli.distributed import Processes
from craftcli.engine.run import open_run

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from tiny.act import STATE_ONLY
from tiny.world import write_dataset


def steps(folder: Path, teacher: Teacher, **settings: Any) -> Iterator[float]:
    """Milliseconds of processor time of every step of a run."""
    config = TrainConfig(
        teacher=teacher, steps=1000, device="cpu", output=folder / "runs" / teacher, **settings
    )
    training = open_run(config, {}, Processes()).trainer().steps()
    next(training)
    while True:
        begin = time.thread_time()
        next(training)
        yield (time.thread_time() - begin) * 1e3


def compare(rounds: int, **settings: Any) -> dict[Teacher, list[float]]:
    """Steps of both kinds, in turn."""
    with tempfile.TemporaryDirectory() as scratch, working_in(Path(scratch)) as folder:
        runs = {teacher: steps(folder, teacher, **settings) for teacher in Teacher}
        found: dict[Teacher, list[float]] = {teacher: [] for teacher in Teacher}
        for _ in range(rounds):
            for teacher, training in runs.items():
                found[teacher] += islice(training, 1)
    return found


@contextmanager
def working_in(folder: Path) -> Iterator[Path]:
    """Caches that runs make lie beside them."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


def rows(*, quick: bool) -> list[Row]:
    """A step with a live teacher over one with a cache, for the demo."""
    found = compare(2, anchor_samples=32) if quick else compare(20)
    pairs = zip(found[Teacher.LIVE], found[Teacher.CACHED], strict=True)
    ratios = [live / cached for live, cached in pairs]
    return [row_of("live: a step with a live teacher / with a cache", "processor time", ratios)]


def main(rounds: int = 20) -> None:
    """Print milliseconds of a step of each kind, and their ratio."""
    print(f"{date.today()}, {os.cpu_count()} cores; 8 task samples and 16 anchors a step")
    with tempfile.TemporaryDirectory() as data:
        policy = STATE_ONLY.make(Path(data) / "policy")
        states = {"policy": str(policy), "dataset": str(write_dataset(Path(data) / "new"))}
        lora = "r=4,targets=q_proj;v_proj"
        cases: dict[str, dict[str, Any]] = {
            "demo, hidden + action": {},
            "demo, LoRA": {"lora": lora},
            "states, hidden + action": states,
        }
        for name, settings in cases.items():
            found = compare(rounds, **settings)
            pairs = zip(found[Teacher.LIVE], found[Teacher.CACHED], strict=True)
            times = ", ".join(f"{kind} {median(taken):.1f} ms" for kind, taken in found.items())
            print(f"{name}: {times}, live / cached {median(a / b for a, b in pairs):.2f}")


if __name__ == "__main__":
    typer.run(main)
