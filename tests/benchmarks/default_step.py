"""What the default of `craft train` costs, in multiples of LeRobot's own `update_policy`.

    uv run python tests/benchmarks/default_step.py
    uv run python tests/benchmarks/default_step.py --quick

For four families, with 8 and with 32 samples of the task a step:

- default: the anchors of the default, one backward pass while the budget holds, two in one step of
  ten;
- two passes: the same anchors, with the gradients told apart in every step;
- 16 anchors: the same with 16 anchors, the default until 2026-11.

Steps of all variants are taken in turn, in an order that changes. A ratio is that of ten steps of
one variant to ten of LeRobot's; its median, and its least and largest value over such tens.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

import torch
from accelerate import Accelerator
from lerobot.scripts.lerobot_train import update_policy
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker
from table import Row, where
from train_step import QUICK, Sizes, make_policy

from craftcli.cache.build.build import build_cache
from craftcli.config.cache import CacheConfig
from craftcli.config.train import TrainConfig
from craftcli.engine.execution import Execution
from craftcli.engine.retention.retention import MEASURE_EVERY, Retention, open_retention
from craftcli.engine.step import train_step
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.datasets import open_dataset
from craftcli.sources import open_anchor_data, open_task_data

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from tiny import act, diffusion, smolvla
from tiny.world import save, write_dataset

CLIP = 1.0
BATCHES = (8, 32)
AT_MOST = {8: 1.3, 32: 1.15}
"""What the default may cost, by the size of the batch."""
ANCHORS = 32
FAMILIES = ("pi0_fast", "smolvla", "act", "diffusion")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step of a variant costs, in steps of LeRobot's with the same batch."""

    family: str
    millions: float
    batch: int
    anchors: int
    variant: str
    wall: float
    processor: float
    least: float
    largest: float
    """The least and the largest of the ratios by processor time."""


class World:
    """A policy with its data, old and new."""

    def __init__(self, family: str, folder: Path, *, quick: bool) -> None:
        if family == "pi0_fast":
            self.student = make_policy(QUICK if quick else Sizes(), folder / "policy")
            self.old = open_anchor_data(CacheConfig(), self.student)
            self.new = open_task_data(TrainConfig(), self.student)
            return
        wide = 1 if quick else 8
        made = {
            "act": lambda: save(folder / "policy", act.policy(cameras=1, width=32 * wide)),
            "diffusion": lambda: save(
                folder / "policy",
                diffusion.policy(cameras=1, down_dims=(16 * wide, 32 * wide)),
            ),
            "smolvla": lambda: save(
                folder / "policy",
                smolvla.policy(smolvla.write_vlm(folder / "vlm", width=32 * wide)),
            ),
        }[family]()
        self.student = load_checkpoint(str(made), device="cpu")
        config = self.student.policy.config
        data = write_dataset(folder / "data")
        self.old = self.new = open_dataset(str(data), root=None, policy_config=config)


class Bench:
    """Every way to take a step with one policy and one batch."""

    def __init__(self, student: Checkpoint, old: Any, new: Any, batch: int, folder: Path) -> None:
        self.student, self.policy = student, student.policy
        rows = list(itertools.islice(itertools.cycle(range(len(new))), batch))
        self._batch = student.preprocess(read_rows(new, rows))
        self._optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-6)
        self._execution = Execution(self.policy)
        self._accelerator = Accelerator(cpu=True)
        meters = {name: AverageMeter(name) for name in ("loss", "grad_norm", "lr", "update_s")}
        self._metrics = MetricsTracker(batch, 1, 1, meters)
        self._cache = folder / "anchors.zarr"
        if old is not None and not self._cache.exists():
            build = CacheConfig(
                samples=min(ANCHORS, len(old)), kind="hidden+action", output=self._cache
            )
            build_cache(build, student, old, on_plan=_ignore, on_rows=_ignore)

    def lerobot(self) -> None:
        """A step of LeRobot's."""
        update_policy(
            self._metrics, self.policy, self._batch, self._optimizer, CLIP, self._accelerator
        )

    def craft(self, **settings: Any) -> tuple[Callable[[], None], int]:
        """A step of ours, and how many anchors it has."""
        config = TrainConfig(batch_size=len(self._batch["action"]), steps=10_000, **settings)
        # A budget that holds, as it does for most of a run.
        config = TrainConfig(**{**config.to_json(), "epsilon_start": 1.0})
        retention = open_retention(config, self.student, self._cache)
        assert retention.anchors is not None
        anchors = retention.anchors.batch_size
        # The first steps of a run always take two passes.
        numbers = itertools.count(MEASURE_EVERY)
        return lambda: self._step(next(numbers), retention), anchors

    def _step(self, number: int, retention: Retention) -> None:
        train_step(
            number,
            [self._batch],
            policy=self.policy,
            execution=self._execution,
            optimizer=self._optimizer,
            scheduler=None,
            retention=retention,
            clip_norm=CLIP,
            data_s=0.0,
        )


def _ignore(_: object) -> None:
    pass


def measure(family: str, batch: int, bench: Bench, *, tens: int) -> list[Cost]:
    """The ratios of all variants for one policy and one size of batch."""
    apart = {"project_when": "conflict", "conflict_threshold": -1.0}
    variants = {
        "default": bench.craft(),
        "two passes": bench.craft(**apart),
        "16 anchors": bench.craft(**apart, anchor_batch_size=min(16, ANCHORS // 2)),
    }
    steps: dict[str, Callable[[], None]] = {"lerobot": bench.lerobot}
    steps |= {name: step for name, (step, _) in variants.items()}
    clocks = (time.perf_counter, time.thread_time)
    seconds = {name: ([], []) for name in steps}  # type: dict[str, tuple[list[float], list[float]]]
    order = list(steps)
    for number in range(2 + MEASURE_EVERY * tens):
        random.Random(number).shuffle(order)
        for name in order:
            started = [clock() for clock in clocks]
            steps[name]()
            if number >= 2:  # the first two bring everything into memory
                for taken, clock, start in zip(seconds[name], clocks, started, strict=True):
                    taken.append(clock() - start)
    millions = sum(p.numel() for p in bench.policy.parameters()) / 1e6
    found = []
    for name, (_, anchors) in variants.items():
        wall, processor = (
            _ratios(mine, theirs)
            for mine, theirs in zip(seconds[name], seconds["lerobot"], strict=True)
        )
        found.append(
            Cost(
                family=family,
                millions=round(millions, 2),
                batch=batch,
                anchors=anchors,
                variant=name,
                wall=statistics.median(wall),
                processor=statistics.median(processor),
                least=min(processor),
                largest=max(processor),
            )
        )
    return found


def _ratios(mine: list[float], theirs: list[float]) -> list[float]:
    """Of ten steps to ten steps: one of ten has two passes."""
    tens = [slice(n, n + MEASURE_EVERY) for n in range(0, len(mine), MEASURE_EVERY)]
    return [sum(mine[ten]) / sum(theirs[ten]) for ten in tens]


def measure_all(families: Sequence[str], *, quick: bool, tens: int) -> list[Cost]:
    """The ratios of all families and sizes of batch."""
    found = []
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            world = World(family, Path(folder), quick=quick)
            for batch in BATCHES[:1] if quick else BATCHES:
                bench = Bench(world.student, world.old, world.new, batch, Path(folder))
                found += measure(family, batch, bench, tens=1 if quick else tens)
    return found


_ROWS = {"default": "default, L_ret within ε", "two passes": "default, L_ret above ε"}
"""The variants in the table of all benchmarks: with made anchors L_ret is above ε in most steps."""


def rows(*, quick: bool) -> list[Row]:
    """What the default costs for each family; `quick` has one."""
    costs = measure_all(FAMILIES[-1:] if quick else FAMILIES, quick=quick, tens=3)
    return [
        Row(
            compared=f"{_ROWS[cost.variant]}: {cost.family} of {cost.millions:.1f}M, batch of "
            f"{cost.batch}, {cost.anchors} anchors / LeRobot",
            measure="processor time",
            ratio=cost.processor,
            least=cost.least,
            largest=cost.largest,
            at_most=AT_MOST[cost.batch],
        )
        for cost in costs
        if cost.variant in _ROWS
    ]


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    parser.add_argument("--tens", type=int, default=3, help="how often ten steps are compared")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    families = arguments.families.split(",")
    found = measure_all(families, quick=arguments.quick, tens=arguments.tens)
    if arguments.json:
        print(json.dumps([asdict(cost) for cost in found], indent=1))
        return
    print(f"{where()}, 1 thread")
    print(
        "| policy | parameters | batch | variant | anchors | wall clock | processor time | range |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for cost in found:
        print(
            f"| {cost.family} | {cost.millions:.1f}M | {cost.batch} | {cost.variant} | "
            f"{cost.anchors} | {cost.wall:.2f} | {cost.processor:.2f} | "
            f"{cost.least:.2f} to {cost.largest:.2f} |"
        )


if __name__ == "__main__":
    main()
