"""The cost of a training step, in multiples of LeRobot's own `update_policy`.

    uv run python tests/benchmarks/train_step.py
    uv run python tests/benchmarks/train_step.py --quick

All variants train one pi0_fast on one batch, round after round in an order that changes, so that
whatever else the machine does hits all of them. A ratio is taken within a round, and the median
over rounds printed. The rounds before the first that counts bring every anchor's image into memory.
Processor time is that of the training thread, which a busy machine does not stretch as it does the
wall clock's.
"""

import argparse
import collections
import dataclasses
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
from surgery_memory import operation_peak
from table import Row, row_of, where

from craftcli.cache.build.build import build_cache
from craftcli.choices import Mode, Pooling
from craftcli.config.cache import CacheConfig
from craftcli.config.train import TrainConfig
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.modeling_tiny_pi0_fast import TinyPI0FastPolicy
from craftcli.engine.execution import Execution
from craftcli.engine.retention.imitation import Imitation
from craftcli.engine.retention.retention import Retention, open_retention
from craftcli.engine.step import train_step
from craftcli.policies.lerobot.batches import read_rows
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.sources import open_anchor_data, open_task_data

CLIP = 1.0
CADENCE = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the policy and its batches are."""

    width: int = 256
    depth: int = 8
    vision_depth: int = 2
    vocab: int = 4096
    patch_px: int = 8
    batch: int = 8
    anchors: int = 32


QUICK = Sizes(width=64, depth=4, vision_depth=1, vocab=512, patch_px=16, batch=4, anchors=16)


def make_policy(sizes: Sizes, folder: Path) -> Checkpoint:
    """The demo's policy with other sizes and random weights, saved and opened like any other."""
    demo = load_checkpoint(str(TEACHER_FOLDER), device="cpu")
    config = dataclasses.replace(
        demo.policy.config,
        width=sizes.width,
        mlp_dim=4 * sizes.width,
        head_dim=sizes.width // 4,
        depth=sizes.depth,
        vocab_size=sizes.vocab,
        vision_width=sizes.width,
        vision_mlp_dim=4 * sizes.width,
        vision_depth=sizes.vision_depth,
        patch_px=sizes.patch_px,
    )
    torch.manual_seed(0)
    TinyPI0FastPolicy(config).save_pretrained(folder)
    demo.preprocess.save_pretrained(folder)
    demo.postprocess.save_pretrained(folder)
    return load_checkpoint(str(folder), device="cpu")


class Bench:
    """One policy, one optimizer, one task batch, and every way to take a step with them."""

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        self.student = make_policy(sizes, folder / "policy")
        self.policy = self.student.policy
        self._sizes = sizes
        self._folder = folder
        self._old = open_anchor_data(CacheConfig(), self.student)
        new = open_task_data(TrainConfig(), self.student)
        self._batch = self.student.preprocess(read_rows(new, list(range(sizes.batch))))
        self._optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-5)
        self._execution = Execution(self.policy)
        self._accelerator = Accelerator(cpu=True)
        meters = {name: AverageMeter(name) for name in ("loss", "grad_norm", "lr", "update_s")}
        # Numbers go on, because the next anchors are read ahead.
        self._numbers = collections.defaultdict[Retention | None, Iterator[int]](itertools.count)
        self._metrics = MetricsTracker(sizes.batch, 1, 1, meters)

    def retention(self, cache: str, config: TrainConfig, **settings: Any) -> Retention:
        """Retention from a cache of this policy; the cache is built when it is not there."""
        path = self._folder / f"{cache}.zarr"
        if not path.exists():
            build = CacheConfig(samples=self._sizes.anchors, output=path, **settings)
            build_cache(build, self.student, self._old, on_plan=_ignore, on_rows=_ignore)
        config = dataclasses.replace(config, anchor_batch_size=self._sizes.batch)
        return open_retention(config, self.student, path)

    def lerobot(self) -> None:
        """A step of LeRobot's."""
        update_policy(
            self._metrics, self.policy, self._batch, self._optimizer, CLIP, self._accelerator
        )

    def craft(self, retention: Retention | None) -> None:
        """A step of ours, the next one of those that were taken with this retention."""
        train_step(
            next(self._numbers[retention]),
            [self._batch],
            policy=self.policy,
            execution=self._execution,
            optimizer=self._optimizer,
            scheduler=None,
            retention=retention,
            clip_norm=CLIP,
            data_s=0.0,
        )

    def anchors_alone(self, retention: Retention) -> Callable[[], None]:
        """Forward and backward of one anchor batch that lies ready, and nothing else."""
        (term,) = retention.terms
        assert isinstance(term, Imitation)
        batch = term.anchors.batch(0, torch.device("cpu"))

        def run() -> None:
            loss = term.compare(term.features(batch), batch, term.loss)[Mode.HIDDEN].total
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._optimizer.zero_grad()

        return run


def _ignore(_: object) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One comparison: what was measured by each clock, and what is asked for."""

    name: str
    values: tuple[float, ...]
    target: float | None = None
    rounds: tuple[float, ...] = ()
    """The ratio of each round by processor time."""

    def __str__(self) -> str:
        shown = " | ".join(self._shown(value) for value in self.values)
        return f"| {self.name} | {shown} | {'' if self.target is None else f'{self.target:.2f}'} |"

    def _shown(self, value: float) -> str:
        if self.target is None:
            return f"{value:.2f}"
        return f"{value:.2f} {'met' if value <= self.target else 'missed'}"


class Times:
    """Seconds of every variant in every round, by the wall clock and by the thread's own."""

    def __init__(
        self, variants: dict[str, Callable[[], None]], *, rounds: int, warm_up: int
    ) -> None:
        clocks = (time.perf_counter, time.thread_time)
        self.clocks: list[dict[str, list[float]]] = [{n: [] for n in variants} for _ in clocks]
        order, shuffle = list(variants), random.Random(0).shuffle
        for number in range(warm_up + rounds):
            # What ran before decides what lies in the processor's caches: worth up to a tenth.
            shuffle(order)
            for name in order:
                started = [clock() for clock in clocks]
                variants[name]()
                if number >= warm_up:
                    for seconds, clock, start in zip(self.clocks, clocks, started, strict=True):
                        seconds[name].append(clock() - start)

    def ratio(self, name: str, above: str, *below: str, target: float | None = None) -> Ratio:
        """The median over rounds of one variant over the sum of others in the same round."""
        values = []
        for seconds in self.clocks:
            rounds = zip(seconds[above], *(seconds[b] for b in below), strict=True)
            ratios = tuple(one / sum(others) for one, *others in rounds)
            values.append(statistics.median(ratios))
        return Ratio(name, tuple(values), target, ratios)


def repeat(step: Callable[[], None]) -> None:
    """As many steps as have one retention turn."""
    for _ in range(CADENCE):
        step()


def compare(bench: Bench, sizes: Sizes, rounds: int) -> list[Ratio]:
    """Measure everything; what it costs and may cost."""
    both = {"kind": "hidden+token_ce"}
    own = bench.retention("both", TrainConfig(mode="hidden"), **both)
    sometimes = bench.retention("both", TrainConfig(mode="hidden", retention_every=CADENCE))
    tokens = bench.retention("both", TrainConfig(mode="token_ce"))
    first = sizes.depth // 4 - 1
    stopping = {"kind": "hidden", "layers": str(first), "pooling": Pooling.VISION_TEXT}
    early = bench.retention("early", TrainConfig(mode="hidden"), **stopping)
    times = Times(
        {
            "lerobot": bench.lerobot,
            "none": lambda: bench.craft(None),
            "hidden": lambda: bench.craft(own),
            "anchors": bench.anchors_alone(own),
            "token_ce": lambda: bench.craft(tokens),
            "early": lambda: bench.craft(early),
            "lerobot_5": lambda: repeat(bench.lerobot),
            "hidden_5": lambda: repeat(lambda: bench.craft(sometimes)),
        },
        rounds=rounds,
        warm_up=sizes.anchors // sizes.batch,
    )
    for name, seconds in times.clocks[0].items():
        print(f"  {name:9} {1e3 * statistics.median(seconds):8.1f} ms", file=sys.stderr)
    return [
        times.ratio("`none` / LeRobot", "none", "lerobot", target=1.03),
        times.ratio("`hidden`, K=1 / its parts alone", "hidden", "lerobot", "anchors", target=1.05),
        times.ratio(f"`hidden`, K={CADENCE} / LeRobot", "hidden_5", "lerobot_5", target=1.25),
        times.ratio(f"`hidden` of layer {first} / `token_ce`", "early", "token_ce", target=1 / 1.3),
        times.ratio("`hidden` of the last layers / `token_ce`", "hidden", "token_ce"),
        times.ratio("`hidden`, K=1 / LeRobot", "hidden", "lerobot"),
        *memory(bench, own),
    ]


def memory(bench: Bench, retention: Retention) -> list[Ratio]:
    """What a step allocates at its peak, beyond weights and optimizer state."""
    lerobot = operation_peak(bench.lerobot)
    none = operation_peak(lambda: bench.craft(None))
    hidden = operation_peak(lambda: bench.craft(retention))
    gradients = sum(p.nbytes for p in bench.policy.parameters())
    return [
        Ratio("peak memory of `none` / LeRobot", (none / lerobot,) * 2, target=1.03),
        Ratio(
            "extra peak memory of `hidden` / one copy of the gradients",
            ((hidden - lerobot) / gradients,) * 2,
            target=1.1,
        ),
    ]


def rows(*, quick: bool) -> list[Row]:
    """The ratios of time by processor time, and those of memory."""
    sizes = QUICK if quick else Sizes()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Bench(sizes, Path(folder)), sizes, rounds=2 if quick else 30)
    return [
        row_of(f"step: {ratio.name}", "processor time", ratio.rounds, at_most=ratio.target)
        if ratio.rounds
        else Row(
            compared=f"step: {ratio.name}",
            measure="memory",
            ratio=ratio.values[0],
            at_most=ratio.target,
        )
        for ratio in found
    ]


def main() -> None:
    """Measure, and print which targets are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    parser.add_argument("--rounds", type=int, default=30)
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int)
    arguments = vars(parser.parse_args())
    quick, rounds = arguments.pop("quick"), arguments.pop("rounds")
    chosen = {name: value for name, value in arguments.items() if value is not None}
    sizes = dataclasses.replace(QUICK if quick else Sizes(), **chosen)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(sizes, Path(folder))
        millions = sum(p.numel() for p in bench.policy.parameters()) / 1e6
        print(where())
        print(f"torch {torch.__version__}, {torch.get_num_threads()} thread")
        print(f"{millions:.1f}M parameters, {sizes}")
        found = compare(bench, sizes, 2 if quick else rounds)
    print("| compared | wall clock | processor time | at most |\n|---|---|---|---|")
    print(*found, sep="\n")


if __name__ == "__main__":
    main()
