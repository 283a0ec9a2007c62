"""Policies of the sizes that people train: start-up, memory and step beside LeRobot's own.

    uv run python tests/benchmarks/real_size.py --sizes act,diffusion
    uv run python tests/benchmarks/real_size.py --quick

ACT of 52M parameters, diffusion of 260M, smolvla of 450M, and pi0_fast of 2.9B in bfloat16 with
LoRA weights; all weights are random. Every part runs in a process of its own, so that its peak is
its own. `--quick` has tiny policies and one process, to see that everything runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from table import HEADER, Row, where

from craftcli.system.memory import peak_bytes

NAMES = ("act", "diffusion", "smolvla", "pi0_fast")
_WITH_TOKENIZERS = (
    "from craftcli.demo.tokenizers import register_action_tokenizer\n"
    "from craftcli.cli.app import main\n"
    "register_action_tokenizer()\n"
    "main()\n"
)
"""craft, told of the demo's tokenizers: they stand in for those of the Hub, which bring code."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a command of craft took."""

    name: str
    wall_s: float
    processor_s: float
    peak_gib: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was found for one policy; memory beyond the imports is in multiples of its weights."""

    size: str
    millions: float
    weights_gib: float
    batch: int
    lerobot_load_s: float
    craft_load_s: float
    lerobot_load_memory: float
    craft_load_memory: float
    step_s: float
    """Processor time of LeRobot's step."""
    steps: tuple[float, ...]
    """Ratios of craft's default step to LeRobot's, by processor time."""
    start_steps: float
    """Self-check and reach before the first step, in steps of LeRobot's."""
    lerobot_peak_gib: float
    """A process that loads and takes steps with LeRobot alone."""
    commands: tuple[Command, ...]

    def rows(self) -> list[Row]:
        """The ratios of this policy."""
        name, train = f"{self.size}, {self.millions:.0f}M", self.commands[-1]
        return [
            _row(f"{name}: loading / LeRobot's", "processor time", self._load_time, 1.1),
            _row(f"{name}: loading / LeRobot's", "peak memory", self._load_memory, 1.1),
            _row(f"{name}: loading / its weights", "peak memory", self.craft_load_memory),
            _row(f"{name}: checks before the first step / LeRobot's step", "processor time",
                 self.start_steps),
            Row(
                compared=f"{name}: the default's step / LeRobot's, batch of {self.batch}",
                measure="processor time",
                ratio=statistics.median(self.steps),
                least=min(self.steps),
                largest=max(self.steps),
            ),
            _row(f"{name}: `craft train` / loading and steps with LeRobot", "peak memory",
                 train.peak_gib / self.lerobot_peak_gib),
        ]  # fmt: skip

    @property
    def _load_time(self) -> float:
        return self.craft_load_s / self.lerobot_load_s

    @property
    def _load_memory(self) -> float:
        return self.craft_load_memory / self.lerobot_load_memory


def _row(compared: str, measure: str, ratio: float, at_most: float | None = None) -> Row:
    return Row(compared=compared, measure=measure, ratio=ratio, at_most=at_most)


def measure(name: str, folder: Path, *, quick: bool) -> Measured:
    """Measure one policy: loading, steps and every command."""
    job: Callable[[str], dict[str, Any]] = lambda part: _run_job(  # noqa: E731
        part, name, folder, quick=quick
    )
    made = job("make")
    lerobot, load = job("lerobot"), job("load")
    commands = [_run(command, made, folder, quick=quick) for command in ("build", "inspect")]
    craft = job("craft")
    commands += [_run(command, made, folder, quick=quick) for command in ("dryrun", "train")]
    weights = load["weights"]
    return Measured(
        size=name,
        millions=load["parameters"] / 1e6,
        weights_gib=weights / 2**30,
        batch=made["batch"],
        lerobot_load_s=lerobot["load_s"],
        craft_load_s=load["load_s"],
        lerobot_load_memory=lerobot["load_memory"] / weights,
        craft_load_memory=load["load_memory"] / weights,
        step_s=statistics.median(craft["lerobot_s"]),
        steps=tuple(
            ours / theirs for ours, theirs in zip(craft["craft_s"], craft["lerobot_s"], strict=True)
        ),
        start_steps=craft["start_s"] / statistics.median(craft["lerobot_s"]),
        lerobot_peak_gib=lerobot["peak"] / 2**30,
        commands=tuple(commands),
    )


def _run_job(job: str, name: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Run a part of the benchmark in a process of its own, unless it is to be quick."""
    if quick:
        import real_size_jobs

        result: dict[str, Any] = real_size_jobs.JOBS[job](name, folder, quick=True)
        return result
    script = Path(__file__).with_name("real_size_jobs.py")
    text, _ = _watched([sys.executable, str(script), job, name, str(folder)])
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def _run(command: str, made: dict[str, Any], folder: Path, *, quick: bool) -> Command:
    """Run a command of craft and measure it."""
    arguments = _arguments(command, made, folder)
    if quick:
        began = time.perf_counter(), time.process_time()
        _run_here(arguments)
        took = time.perf_counter() - began[0], time.process_time() - began[1]
        peak = peak_bytes() / 2**30  # of all that this process has done
        return Command(name=command, wall_s=took[0], processor_s=took[1], peak_gib=peak)
    began_s = time.perf_counter()
    craft = [str(Path(sys.executable).with_name("craft"))]
    if made["own_tokenizers"]:
        craft = [sys.executable, "-c", _WITH_TOKENIZERS]
    _, usage = _watched([*craft, *arguments])
    return Command(
        name=command,
        wall_s=time.perf_counter() - began_s,
        processor_s=usage.ru_utime + usage.ru_stime,
        peak_gib=usage.ru_maxrss / 2**20,
    )


def _arguments(command: str, made: dict[str, Any], folder: Path) -> list[str]:
    cache, steps = str(folder / "anchors.zarr"), str(made["rounds"])
    data = ["--policy", made["policy"], "--dataset", made["dataset"], "--device", "cpu"]
    run = [*data, "--cache", cache, "--batch-size", str(made["batch"])]
    run += ["--lora", made["lora"]] if made["lora"] else []
    build = [*data, "--samples", str(made["anchors"]), "--batch-size", str(made["batch"])]
    build += made["build"]
    return {
        "build": ["cache", "build", *build, "--output", cache],
        "inspect": ["cache", "inspect", cache],
        "dryrun": ["dryrun", *run, "--steps", steps],
        "train": ["train", *run, "--steps", steps, "--output", str(folder / "run")],
    }[command]


def _run_here(arguments: Sequence[str]) -> None:
    from typer.testing import CliRunner

    from craftcli.cli.app import app

    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    if result.exit_code:
        raise RuntimeError(f"craft {' '.join(arguments)} failed: {result.output}")


def _watched(arguments: Sequence[str]) -> tuple[str, Any]:
    """The output of a process, and what it used."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            arguments, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stdout.close()
        errors.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(arguments)} failed: {text}\n{errors.read()[-3000:]}")
    return text, usage


def measure_all(names: Sequence[str], *, quick: bool) -> list[Measured]:
    """Measure policies one after the other; their files are removed in between."""
    found = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(name, Path(folder), quick=quick))
    return found


def rows(*, quick: bool) -> list[Row]:
    """The ratios of the smallest policy."""
    return [row for found in measure_all(NAMES[:1], quick=quick) for row in found.rows()]


def show(found: Sequence[Measured]) -> None:
    """Print the ratios and what each command took."""
    print(where())
    print(HEADER)
    for measured in found:
        print(*measured.rows(), sep="\n")
    print("\n| policy | weights | command | wall clock | processor time | peak memory |")
    print("|---|---|---|---|---|---|")
    for measured in found:
        for took in measured.commands:
            print(
                f"| {measured.size} | {measured.weights_gib:.2f} GiB | {took.name} | "
                f"{took.wall_s:.0f} s | {took.processor_s:.0f} s | {took.peak_gib:.2f} GiB |"
            )


def main() -> None:
    """Measure, and print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="act,diffusion", help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure_all(arguments.sizes.split(","), quick=arguments.quick)
    if arguments.json:
        print(json.dumps([asdict(measured) for measured in found], indent=1))
    else:
        show(found)


if __name__ == "__main__":
    main()
