"""How costs grow: with the rows of a cache, retained layers, parameters and processes.

    uv run python tests/benchmarks/growth.py
    uv run python tests/benchmarks/growth.py --plot growth.png --only rows,layers
    uv run python tests/benchmarks/growth.py --quick

Every cost is in multiples of that of the smallest; sizes are measured in turn, round after round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from synthetic import activations, write_cache
from table import Row, where
from train_step import QUICK, Bench, Sizes

from craftcli.cache.reading.reader import CacheReader
from craftcli.config.train import TrainConfig

BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A cost at growing sizes, in multiples of its first value."""

    of: str
    """What grows."""
    cost: str
    sizes: tuple[int, ...]
    ratios: tuple[float, ...]

    def rows(self) -> list[Row]:
        """A row for each size beyond the first."""
        first = self.sizes[0]
        return [
            Row(
                compared=f"growth: {self.cost}, {size:,} {self.of} / {first:,}",
                measure="wall clock" if self.of == "processes" else "processor time",
                ratio=ratio,
            )
            for size, ratio in zip(self.sizes[1:], self.ratios[1:], strict=True)
        ]


def grow_rows(folder: Path, *, quick: bool) -> list[Curve]:
    """Opening a cache, and reading a random batch of it."""
    sizes = (100, 1000) if quick else (1_000, 10_000, 100_000, 1_000_000)
    for size in sizes:
        write_cache(folder / f"{size}.zarr", activations(size, 1, 16))
    names = ["hidden/vlm.16", "hidden/vlm.17"]
    rng = np.random.default_rng(0)

    def opening(size: int) -> Callable[[], object]:
        return lambda: CacheReader.open(folder / f"{size}.zarr")

    def reading(size: int) -> Callable[[], object]:
        reader = CacheReader.open(folder / f"{size}.zarr")
        for name in names:  # the first read of a chunk checks it
            reader.read(name, np.arange(size))
        return lambda: [reader.read(name, rng.integers(0, size, BATCH)) for name in names]

    few, many = (2, 20) if quick else (9, 2000)
    return [
        _curve("rows", "opening a cache", {s: opening(s) for s in sizes}, rounds=few),
        _curve("rows", f"a random batch of {BATCH}", {s: reading(s) for s in sizes}, rounds=many),
    ]


def grow_layers(folder: Path, *, quick: bool) -> list[Curve]:
    """A step that holds the hidden states of the last layers, with a policy of 8 layers."""
    counts = (1, 2) if quick else (1, 2, 4, 8)
    sizes = QUICK if quick else Sizes(width=128, vocab=1024)
    bench = Bench(sizes, folder)
    ways: dict[int, Callable[[], object]] = {}
    for count in counts:
        layers = ",".join(str(-number) for number in range(count, 0, -1))
        retention = bench.retention(
            f"layers-{count}", TrainConfig(mode="hidden"), kind="hidden", layers=layers
        )
        ways[count] = partial(bench.craft, retention)
    return [_curve("layers", "a step that holds them", ways, rounds=2 if quick else 10)]


def grow_parameters(folder: Path, *, quick: bool) -> list[Curve]:
    """LeRobot's step and a step that holds hidden states, for wider and wider policies."""
    widths = (32, 64) if quick else (64, 128, 256, 512)
    theirs: dict[int, Callable[[], object]] = {}
    ours: dict[int, Callable[[], object]] = {}
    smallest = 0
    for width in widths:
        sizes = Sizes(
            width=width, depth=4, vision_depth=1, vocab=512, patch_px=16, batch=4, anchors=8
        )
        bench = Bench(sizes, folder / str(width))
        retention = bench.retention("anchors", TrainConfig(mode="hidden"), kind="hidden")
        count = sum(parameter.numel() for parameter in bench.policy.parameters())
        smallest = smallest or count
        factor = round(count / smallest)
        theirs[factor] = bench.lerobot
        ours[factor] = partial(bench.craft, retention)
    rounds = 2 if quick else 10
    return [
        _curve("times the parameters", "LeRobot's step", theirs, rounds=rounds),
        _curve("times the parameters", "a step with as many anchors", ours, rounds=rounds),
    ]


def grow_processes(folder: Path, *, quick: bool) -> list[Curve]:
    """A step of the demo, by the wall clock; each process has a batch of its own."""
    counts = (1,) if quick else (1, 2)
    taken = [_step_s(folder / str(count), count, steps=2 if quick else 20) for count in counts]
    return [
        Curve(
            of="processes",
            cost="a step of `craft train`",
            sizes=counts,
            ratios=tuple(seconds / taken[0] for seconds in taken),
        )
    ]


def _step_s(folder: Path, processes: int, *, steps: int) -> float:
    """Median seconds of a step of `craft train` in so many processes."""
    folder.mkdir(parents=True)
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    train = ["train", "--steps", str(steps), "--log-every", "1", "--anchor-samples", "32"]
    # Only the wall clock shows what waiting for other processes costs.
    subprocess.run(
        [*launch, "-m", "craftcli", *train, "--device", "cpu", "--output", "run"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    taken: list[float] = [json.loads(line)["update_s"] for line in lines[1:]]
    return statistics.median(taken)


def _curve(of: str, cost: str, ways: Mapping[int, Callable[[], object]], *, rounds: int) -> Curve:
    """Median processor time of each size over that of the first, all of them in turn."""
    taken: dict[int, list[float]] = {size: [] for size in ways}
    for number in range(1 + rounds):
        for size, way in ways.items():
            began = time.thread_time()
            way()
            if number:  # the first brings everything into memory
                taken[size].append(time.thread_time() - began)
    medians = [statistics.median(seconds) for seconds in taken.values()]
    return Curve(
        of=of, cost=cost, sizes=tuple(ways), ratios=tuple(value / medians[0] for value in medians)
    )


GROWING: dict[str, Callable[..., list[Curve]]] = {
    "rows": grow_rows,
    "layers": grow_layers,
    "parameters": grow_parameters,
    "processes": grow_processes,
}


def measure(names: Sequence[str], *, quick: bool) -> list[Curve]:
    """The curves of everything that is named."""
    found = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found += GROWING[name](Path(folder), quick=quick)
    return found


def rows(*, quick: bool) -> list[Row]:
    """All curves, without the processes if it is to be quick."""
    names = [name for name in GROWING if not quick or name != "processes"]
    return [row for curve in measure(names, quick=quick) for row in curve.rows()]


def draw(curves: Sequence[Curve]) -> Any:
    """A panel for each thing that grows."""
    from matplotlib.figure import Figure

    things = list(dict.fromkeys(curve.of for curve in curves))
    figure = Figure(figsize=(3.4 * len(things), 3.2), layout="constrained")
    for number, of in enumerate(things):
        axes = figure.add_subplot(1, len(things), number + 1)
        for curve in (curve for curve in curves if curve.of == of):
            axes.plot(curve.sizes, curve.ratios, marker="o", label=curve.cost)
        sizes = next(curve.sizes for curve in curves if curve.of == of)
        axes.set_xscale("log", base=10 if max(sizes) > 100 else 2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        top = max(ratio for curve in curves if curve.of == of for ratio in curve.ratios)
        if top > 10:
            axes.set_yscale("log")
            # The style of the plots reads no formulas, which powers of ten would be.
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(0, 1.15 * top)
        axes.set(title=of.capitalize(), xlabel=of, ylabel="cost / that of the smallest")
        axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    """Measure, and print a table or JSON, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    parser.add_argument("--only", default=",".join(GROWING), help="what grows, joined by commas")
    parser.add_argument("--plot", type=Path, help="a PNG file")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    curves = measure(arguments.only.split(","), quick=arguments.quick)
    if arguments.plot:
        from craftcli.plots.png import write_plot

        write_plot(lambda: draw(curves), arguments.plot)
    if arguments.json:
        print(json.dumps([asdict(curve) for curve in curves], indent=1))
        return
    print(where())
    for curve in curves:
        shown = ", ".join(
            f"{size:,}: {ratio:.2f}" for size, ratio in zip(curve.sizes, curve.ratios, strict=True)
        )
        print(f"{curve.cost}, by {curve.of}: {shown}")


if __name__ == "__main__":
    main()
