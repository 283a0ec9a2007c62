"""Old instructions kept while a new one is learned, by a policy that sees images and reads.

    uv run python examples/images_and_language/run.py            # results.json and tables.md
    uv run python examples/images_and_language/run.py --quick    # that it runs

A small smolvla that reaches the red, green and yellow block learns to reach the blue one, plainly
and held in several ways. Everything is done by craft's own commands, which are printed. Stopped, it
goes on where it was. Seed 0 and its episodes are for choosing settings; reported are others.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

# The policy is too small for threads, and sums in another order would change the figures.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The tokenizer is that of the tests' tiny policies, with other words.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/helpers"))

import typer

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from measures import Later, Measured, Recoloured, measure, recoloured, successes
from report import Report
from table import LATER, NEW, OLD, WORDINGS, write_dataset
from teacher import train_teacher

from craftcli.cli.app import app
from craftcli.cli.output import Output
from craftcli.engine.run_folder import CHECKPOINTS
from craftcli.engine.summary_file import RunSummary
from craftcli.policies.lerobot.checkpoint import load_checkpoint

FOLDER = Path(__file__).parent
WORK = Path("runs/images_and_language")
TUNING_SEED = 0
TEACHER = "teacher"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much work goes into everything."""

    teacher_steps: int = 4000
    teacher_lr: float = 1e-3
    teacher_batch: int = 64
    episodes: int = 300
    """Of the old data; the new data has a third as many, and so have frames for probes."""
    steps: int = 500
    """Of fine-tuning."""
    batch_size: int = 32
    lr: float = 5e-4
    frames: int = 512
    few_frames: int = 16
    variations: int = 63
    rollouts: int = 50
    """Episodes of every colour and of each kind of wording."""
    later_steps: tuple[int, ...] = (10, 20, 50)
    """After which success on a third task is measured, which is then learned plainly. After 50 all
    policies reach it, so that earlier ones tell them apart."""


FULL = Effort()
QUICK = Effort(
    teacher_steps=2,
    teacher_batch=4,
    episodes=9,
    steps=2,
    batch_size=4,
    frames=12,
    few_frames=6,
    variations=2,
    rollouts=2,
    later_steps=(1, 2),
)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of fine-tuning: options of `craft cache build`, if any, and of `craft train`."""

    train: tuple[str, ...]
    frames: int = 0
    """Old frames that a cache is built from; 0 for none."""
    cache: tuple[str, ...] = ()
    later: bool = False
    """Whether a third task is learned afterwards, plainly: was more kept than the skill?"""
    recoloured: bool = False
    """Whether it is measured among faded blocks: does the kept skill reach further?"""


def arms(effort: Effort) -> dict[str, Arm]:
    """What is compared."""
    frames, few = effort.frames, effort.few_frames
    augment, draws = ("--augment", str(effort.variations)), ("--draws", "4")
    replay = ("--mode", "replay", "--lambda-lr", "0", "--surgery", "none")
    return {
        "plain fine-tuning": Arm(train=("--mode", "none"), later=True, recoloured=True),
        f"hidden + action, {frames} frames (default)": Arm(
            train=(), frames=frames, later=True, recoloured=True
        ),
        "no old data: old instructions on new images": Arm(train=("--old-tasks", "OLD_TASKS")),
        f"hidden + action, {few} frames": Arm(train=(), frames=few, recoloured=True),
        f"action, {few} frames": Arm(train=("--mode", "action"), frames=few, recoloured=True),
        f"hidden, {few} frames": Arm(train=("--mode", "hidden"), frames=few),
        f"replay, {few} frames": Arm(train=replay, frames=few),
        f"hidden + action, {few} frames of 4 draws": Arm(train=(), frames=few, cache=draws),
        f"action, {few} frames of 4 draws": Arm(
            train=("--mode", "action"), frames=few, cache=draws
        ),
        f"hidden + action, {few} frames and variations": Arm(train=(), frames=few, cache=augment),
        f"action, {frames} frames": Arm(
            train=("--mode", "action"), frames=frames, later=True, recoloured=True
        ),
        f"hidden, {frames} frames": Arm(
            train=("--mode", "hidden"), frames=frames, later=True, recoloured=True
        ),
        f"replay, {frames} frames": Arm(train=replay, frames=frames, recoloured=True),
    }


class Bench:
    """Makes teacher and data, then fine-tunes and measures; what is done is kept."""

    def __init__(self, work: Path, effort: Effort, output: Output) -> None:
        self._work, self._effort = work, effort
        work.mkdir(parents=True, exist_ok=True)
        with output.progress(effort.teacher_steps, "steps", "Teacher") as advance:
            self.teacher = train_teacher(
                work / TEACHER,
                steps=effort.teacher_steps,
                lr=effort.teacher_lr,
                batch_size=effort.teacher_batch,
                on_step=lambda _loss: advance(1),
            )
        count = effort.episodes
        self._old = write_dataset(work / "old", OLD, episodes=count, seed=1)
        self._new = write_dataset(work / "new", [NEW], episodes=count // 3, seed=2)
        self._probe = write_dataset(work / "probe", OLD, episodes=count // 3, seed=3)
        self._later = write_dataset(work / "later", [LATER], episodes=count // 3, seed=4)
        self._tasks = work / "old_tasks.txt"
        sentences = [wording.format(colour) for colour in OLD for wording in WORDINGS]
        self._tasks.write_text("\n".join(sentences) + "\n", "utf-8")

    def measure(self, policy: Path, *, tuning: bool) -> Measured:
        """Success and what a probe reads from its hidden states."""
        return measure(policy, self._probe, episodes=self._effort.rollouts, tuning=tuning)

    def measure_recoloured(self, policy: Path, *, tuning: bool) -> Recoloured:
        """Success among blocks of colours that were never seen."""
        return recoloured(policy, episodes=self._effort.rollouts, tuning=tuning)

    def learn(self, name: str, arm: Arm, seed: int) -> Path:
        """Fine-tune the teacher in one way; a finished run is kept."""
        run = self._folder(name, seed) / "run"
        summary = RunSummary.read(run)
        if summary and summary.complete:
            return run
        if (run / CHECKPOINTS / "last").exists():
            craft("train", "--resume", run)
            return run
        words = [str(self._tasks) if word == "OLD_TASKS" else word for word in arm.train]
        if arm.frames:
            words += ["--cache", str(self._cache(arm, seed))]
        if self._effort is QUICK and arm.train[:2] != ("--mode", "none"):
            words += ["--anchor-batch-size", "2"]
        effort = self._effort
        craft(
            *("train", "--policy", self.teacher, "--dataset", self._new, "-o", run, *words),
            *("--steps", effort.steps, "--batch-size", effort.batch_size, "--lr", effort.lr),
            *("--lr-schedule", "cosine", "--save-every", 0, "--log-every", 100),
            *("--seed", seed, "--overwrite"),
        )
        return run

    def learn_later(self, name: str, policy: Path, seed: int) -> Later:
        """Learn the third task from a policy, plainly, and measure it on the way."""
        effort, steps = self._effort, self._effort.later_steps
        run = self._folder(name, seed) / f"later-{steps[-1]}"
        summary = RunSummary.read(run)
        if not (summary and summary.complete):
            craft(
                *("train", "--policy", policy, "--dataset", self._later, "-o", run),
                *("--mode", "none", "--steps", steps[-1], "--save-every", steps[0]),
                *("--batch-size", effort.batch_size, "--lr", effort.lr, "--lr-schedule"),
                *("constant", "--log-every", 100, "--seed", seed, "--overwrite"),
            )
        found = {}
        for count in steps:
            checkpoint = run / CHECKPOINTS / f"{count:06d}" / "pretrained_model"
            actor = load_checkpoint(str(checkpoint), device="cpu")
            tuning = seed == TUNING_SEED
            rates = successes(actor, (LATER,), episodes=effort.rollouts, tuning=tuning)
            found[str(count)] = rates[LATER]
        return Later(episodes=effort.rollouts, successes=found)

    def _folder(self, name: str, seed: int) -> Path:
        return self._work / name.replace(" ", "-").replace(":", "") / f"seed-{seed}"

    def _cache(self, arm: Arm, seed: int) -> Path:
        kind = "".join(arm.cache[:1]).removeprefix("-")
        cache = self._work / "caches" / f"{arm.frames}{kind}-seed-{seed}.zarr"
        if not cache.exists():
            craft(
                *("cache", "build", "--policy", self.teacher, "--dataset", self._old),
                *("--samples", arm.frames, *arm.cache, "--seed", seed, "-o", cache),
            )
        return cache


def craft(*arguments: object) -> None:
    """Run a command of craft's in this process, as it would be typed."""
    words = [str(argument) for argument in arguments]
    typer.echo(f"\n$ craft {' '.join(words)}", err=True)
    if code := app(words, standalone_mode=False):
        raise typer.Exit(code)


def measure_missing(bench: Bench, report: Report, name: str, arm: Arm | None, seed: int) -> None:
    """Measure what the report lacks of an arm and a seed; without an arm, of the teacher."""
    tuning = seed == TUNING_SEED
    own = "tuning" if tuning else (str(seed) if arm else "reported")
    is_missing = not report.has(name, own)
    lacks_later = (arm is None or arm.later) and not report.has_later(name, seed)
    lacks_recoloured = (arm is None or arm.recoloured) and not report.has_recoloured(name, own)
    if not (is_missing or lacks_later or lacks_recoloured):
        return
    policy = bench.learn(name, arm, seed) if arm else bench.teacher
    if is_missing:
        report.add(name, own, bench.measure(policy, tuning=tuning))
    if lacks_recoloured:
        report.add_recoloured(name, own, bench.measure_recoloured(policy, tuning=tuning))
    if lacks_later:
        report.add_later(name, seed, bench.learn_later(name, policy, seed))
    typer.echo(f"{name}, seed {seed}: measured")


def main(
    work: Annotated[Path, typer.Option(help="Where data, runs and caches go.")] = WORK,
    seeds: Annotated[str, typer.Option(help="Runs of every arm; 0 is for tuning.")] = "1,2,3",
    only: Annotated[str | None, typer.Option(help="Which arms, with ';' between; all.")] = None,
    steps: Annotated[int | None, typer.Option(help="Of fine-tuning; 500.")] = None,
    quick: Annotated[bool, typer.Option(help="Little of all, to see that it runs.")] = False,
    results: Annotated[Path, typer.Option(help="The figures; others in it are kept.")] = (
        FOLDER / "results.json"
    ),
) -> None:
    """Measure, keep the figures, and renew the tables beside them."""
    effort = QUICK if quick else FULL
    if steps is not None:
        effort = replace(effort, steps=steps)
    if quick and results == FOLDER / "results.json":
        work = work / "quick"
        results = work / "results.json"
    bench = Bench(work, effort, Output())
    every = arms(effort)
    chosen = only.split(";") if only else list(every)
    if unknown := set(chosen) - set(every):
        raise typer.BadParameter(f"no such arm: {'; '.join(sorted(unknown))}")
    report = Report(results, list(every))
    for seed in map(int, seeds.split(",")):
        for name in (TEACHER, *chosen):
            measure_missing(bench, report, name, every.get(name), seed)


if __name__ == "__main__":
    typer.run(main)
