"""Learns task after task with one policy, held on each old task to what it was when it learned it.

After every task the policy answers for the anchors of that task, once and for all: answers of a
later policy would add its drift to that of all before. Everything is done by craft's own commands,
in this process; they are printed. What is finished is not done again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import typer
from matrices import Matrix

from craftcli.cli.app import app
from craftcli.engine.run_folder import CHECKPOINTS
from craftcli.engine.summary_file import RunSummary

BATCH_SIZE = 32
SAVE_EVERY = 2000
"""Steps after which a long run is saved, so that it can be continued; most end before."""
FEW_FRAMES, VARIATIONS = 16, 63
"""Of each old task, for arms that keep little; each frame yields so many further anchors."""
DRAWN_STATES = 4096
"""Anchors of all old tasks together, where they are drawn from statistics."""


class Anchors(StrEnum):
    """What an arm keeps of the old tasks."""

    NOTHING = "nothing"
    LABELLED = "frames with their labels, anew for every task"
    FRAMES = "frames"
    FEW_FRAMES = "a few frames of each task, and variations of them"
    STATISTICS = "the statistics of each task's data"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of fine-tuning."""

    anchors: Anchors
    train: tuple[str, ...]
    """Options of `craft train`."""
    once: tuple[str, ...] = ()
    """Options that only the first fine-tuning takes: LoRA weights are trained further."""
    slower: bool = False
    """Twice the steps at 0.3 of the learning rate: the noise of few anchors moves weights less."""


type Measure = Callable[[Path, Path, int], tuple[float, ...]]
"""Success of a policy on the first tasks, so many of them; it is kept in the file."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """The tasks, and how much work goes into each."""

    folder: Path
    data: Path
    tasks: tuple[str, ...]
    first: Path
    """The policy that knows the first task."""
    measure: Measure
    steps: int
    lr: float
    frames: int
    """Of each old task, for arms that keep frames as they are."""
    quick: bool = False
    """As few anchors as possible, to see that it runs."""
    fixed: str | None = None
    """Vectors that variations leave as they are."""


class TaskSequence:
    """One arm with one seed through all tasks."""

    def __init__(self, course: Course, name: str, arm: Arm, seed: int) -> None:
        self.name, self.seed = name, seed
        self._course, self._arm = course, arm
        self._folder = course.folder / name.replace(" ", "-") / f"seed-{seed}"

    def run(self) -> Iterator[Matrix]:
        """Learn every task; success on all tasks so far, after each."""
        course, policy = self._course, self._course.first
        rows = [course.measure(policy, course.folder / "teacher.json", 1)]
        for number in range(1, len(course.tasks)):
            policy = self._learn(policy, number)
            rows.append(course.measure(policy, policy / "success.json", number + 1))
            yield Matrix(arm=self.name, seed=self.seed, rows=tuple(rows))

    def _learn(self, policy: Path, number: int) -> Path:
        """Fine-tune on one more task, held to the policy as it is now on all tasks before."""
        course, arm = self._course, self._arm
        run = self._folder / f"{number}-{course.tasks[number]}"
        summary = RunSummary.read(run)
        if summary and summary.complete:
            return run
        options = [*arm.train, *(arm.once if number == 1 else ())]
        if arm.anchors is not Anchors.NOTHING and not (run / CHECKPOINTS / "last").exists():
            options += ["--cache", str(self._anchors(policy, number))]
            if number > 1 and arm.anchors is not Anchors.LABELLED:
                options += ["--other-student"]
        if course.quick:
            options += ["--anchor-batch-size", "2"]
        data = [course.data / course.tasks[number]]
        steps, lr = course.steps, course.lr
        if arm.slower:
            steps, lr = 2 * steps, 0.3 * lr
        own = ("--steps", steps, "--lr", lr, "--seed", self.seed)
        return train(policy, data, run, *own, *options)

    def _anchors(self, policy: Path, number: int) -> Path:
        """The cache that the policy is held by while it learns a task."""
        old = self._course.tasks[:number]
        if self._arm.anchors is Anchors.LABELLED:
            # The same weight for each, whatever the length of its episodes.
            weight = ":1" if number > 1 else ""
            data = [("--dataset", f"{self._course.data / task}{weight}") for task in old]
            samples = self._course.frames * number
            words = [word for pair in data for word in pair]
            output = self._folder / f"{number}-anchors.zarr"
            return self._cache(policy, output, *words, "--samples", samples)
        # The policy has just learned the last of the old tasks; of the others there are answers.
        caches = [self._folder / "anchors" / f"{task}.zarr" for task in old]
        if not caches[-1].exists():
            unfinished = caches[-1].with_suffix(".new")
            self._cache(policy, unfinished, *self._made_of(number)).rename(caches[-1])
        if number == 1:
            return caches[0]
        joined = self._folder / "anchors" / "all.zarr"
        craft("cache", "merge", *caches, "--several-teachers", "--overwrite", "-o", joined)
        return joined

    def _made_of(self, number: int) -> tuple[object, ...]:
        """What the anchors of the task before this one are made of."""
        course = self._course
        data, new = (course.data / course.tasks[n] for n in (number - 1, number))
        if self._arm.anchors is Anchors.FRAMES:
            return ("--dataset", data, "--samples", course.frames)
        if self._arm.anchors is Anchors.STATISTICS:
            states = DRAWN_STATES // (len(course.tasks) - 1)
            file = data / "meta/stats.json"
            made = ("--from-statistics", "--statistics-file", file, "--moves-like", new)
            return (*made, "--samples", course.frames if course.quick else states)
        frames, variations = (2, 3) if course.quick else (FEW_FRAMES, VARIATIONS)
        fixed = ("--augment-fixed", course.fixed) if course.fixed else ()
        return ("--dataset", data, "--samples", frames, "--augment", variations, *fixed)

    def _cache(self, policy: Path, output: Path, *options: object) -> Path:
        # Standing alone, caches of different datasets can be joined.
        craft(
            *("cache", "build", "--policy", policy, "-o", output, *options),
            *("--seed", self.seed, "--images", "embed", "--overwrite"),
        )
        return output


def train(policy: Path, data: Sequence[Path], run: Path, *options: object) -> Path:
    """Fine-tune a policy; a run that is there is kept or continued."""
    summary = RunSummary.read(run)
    if summary and summary.complete:
        return run
    if (run / CHECKPOINTS / "last").exists():
        craft("train", "--resume", run)
        return run
    craft(
        *("train", "--policy", policy, "-o", run),
        *(word for part in data for word in ("--dataset", part)),
        *("--batch-size", BATCH_SIZE, "--lr-schedule", "cosine"),
        *("--save-every", SAVE_EVERY, "--log-every", 100, "--overwrite", *options),
    )
    return run


def craft(*arguments: object) -> None:
    """Run a command of craft's in this process, as it would be typed."""
    words = [str(argument) for argument in arguments]
    typer.echo(f"\n$ craft {' '.join(words)}", err=True)
    if code := app(words, standalone_mode=False):
        raise typer.Exit(code)
