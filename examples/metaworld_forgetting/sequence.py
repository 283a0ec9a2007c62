"""Five tasks in a row, each learned by a policy that is held to what it was before.

    uv run --extra metaworld python examples/metaworld_forgetting/sequence.py
    uv run --extra metaworld python examples/metaworld_forgetting/sequence.py --quick

The first makes the table of the README, the second shows that it runs. After every task the policy
becomes the next teacher: caches of all tasks so far are built anew from it and joined. Everything
is done by craft's own commands, which are printed. A run that was stopped is continued.
"""

import json
import os
from pathlib import Path
from statistics import fmean
from typing import Annotated

# The policies are too small for threads, and sums in another order would change the figures.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import typer

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from beginnings import FAMILIES
from bench import FULL, QUICK, Extent
from experts import write_dataset
from matrices import Matrix, matrices_table
from reporting import README, RESULTS_FILE, WORK, add_results, apart, replaced
from teacher import train_teacher

from craftcli.cli.app import app
from craftcli.cli.output import Output
from craftcli.engine.run_folder import CHECKPOINTS
from craftcli.engine.summary_file import RunSummary
from craftcli.evaluation.results import Evaluation

TASKS = (
    "pick-place-v3",
    "door-open-v3",
    "button-press-topdown-v3",
    "drawer-open-v3",
    "window-open-v3",
)
STEPS = 1000
"""For each of the tasks."""
FAMILY = "act"
NAME = "sequence-act"
PLAIN = ["--mode", "none"]
FRAMES, VARIATIONS = 16, 63
"""Of each old task, for the arm that keeps little; each frame yields so many further anchors."""
LITTLE = f"hidden + action, {FRAMES} frames a task"
ARMS = {
    "plain fine-tuning": PLAIN,
    "hidden + action": ["--mode", "hidden+action"],
    LITTLE: ["--mode", "hidden+action"],
    # As it was tuned on the pairs; its anchors come with the experts' labels.
    "replay": ["--mode", "replay", "--lambda-init", "1", "--lambda-lr", "0", "--surgery", "none"],
}


class Sequence:
    """One way of fine-tuning, task after task."""

    def __init__(self, work: Path, arm: str, seed: int, extent: Extent, teacher: Path) -> None:
        self.arm, self.seed = arm, seed
        self._data = work / "data"
        self._folder = work / NAME / arm.replace(" ", "-") / f"seed-{seed}"
        self._extent = extent
        self._teacher = teacher
        # A quick run, whose extent limits the anchors, has few variations too.
        self._variations = 3 if extent.anchors else VARIATIONS

    def run(self) -> Matrix:
        """Learn every task; success on all tasks so far after each."""
        rows = [self._success(self._teacher, self._folder.parent.parent / "teacher.json", 1)]
        policy = self._teacher
        for number in range(1, len(TASKS)):
            policy = self._learn(policy, number)
            rows.append(self._success(policy, policy / "success.json", number + 1))
        return Matrix(arm=self.arm, seed=self.seed, rows=tuple(rows))

    def _learn(self, policy: Path, number: int) -> Path:
        """Fine-tune on one more task, held to the policy as it is now on all tasks before."""
        run = self._folder / f"{number}-{TASKS[number]}"
        summary = RunSummary.read(run)
        if summary and summary.complete:
            return run
        if (run / CHECKPOINTS / "last").exists():
            craft("train", "--resume", run)
            return run
        options = ARMS[self.arm]
        if options != PLAIN:
            options = [*options, "--cache", str(self._anchors(policy, number))]
        craft(
            *("train", "--policy", policy, "--dataset", self._data / TASKS[number], "-o", run),
            *("--steps", self._extent.steps or STEPS, "--batch-size", 32),
            *("--lr", self._extent.lr, "--lr-schedule", "cosine"),
            *("--seed", self.seed, "--save-every", 0, "--log-every", 100, "--overwrite"),
            *options,
        )
        return run

    def _anchors(self, policy: Path, number: int) -> Path:
        """The cache that the policy is held by while it learns a task."""
        folder = self._folder / f"{number}-anchors"
        each = (self._extent.anchors or FAMILIES[FAMILY].anchors) // number
        if self.arm == LITTLE:
            each = min(FRAMES, self._extent.anchors or FRAMES)
        if self.arm == "replay":
            # Labels are read from the data again, so that all rows have to be of one dataset.
            data = write_dataset(
                self._data / f"first-{number}",
                TASKS[:number],
                episodes=self._extent.demonstrations,
            )
            return self._cache(policy, data, folder / "all.zarr", each * number)
        caches = [
            self._cache(policy, self._data / task, folder / f"{task}.zarr", each)
            for task in TASKS[:number]
        ]
        if number == 1:
            return caches[0]
        craft("cache", "merge", *caches, "-o", folder / "all.zarr", "--overwrite")
        return folder / "all.zarr"

    def _cache(self, policy: Path, data: Path, output: Path, samples: int) -> Path:
        # Standing alone, caches of different datasets can be joined.
        craft(
            *("cache", "build", "--policy", policy, "--dataset", data, "-o", output),
            *("--samples", samples, "--seed", self.seed, "--images", "embed", "--overwrite"),
            *(("--augment", self._variations) if self.arm == LITTLE else ()),
        )
        return output

    def _success(self, policy: Path, file: Path, count: int) -> tuple[float, ...]:
        tasks = TASKS[:count]
        if not file.is_file():
            environments = [part for task in tasks for part in ("--env", f"metaworld:{task}")]
            craft(
                *("eval", policy, *environments, "--episodes", self._extent.episodes),
                *("--max-steps", self._extent.max_steps, "--batch-size", 10, "-o", file),
            )
        rates = {found.environment: found.rate for found in Evaluation.load(file).success}
        return tuple(rates[f"metaworld:{task}"] for task in tasks)


def craft(*arguments: object) -> None:
    """Run a command of craft's in this process, as it would be typed."""
    words = [str(argument) for argument in arguments]
    typer.echo(f"\n$ craft {' '.join(words)}", err=True)
    if code := app(words, standalone_mode=False):
        raise typer.Exit(code)


def earlier_matrices(readme: Path, newer: list[Matrix]) -> list[Matrix]:
    """The published matrices of arms and seeds that were not measured again."""
    file = readme.with_name(RESULTS_FILE)
    known = json.loads(file.read_text("utf-8")).get(NAME, []) if file.is_file() else []
    again = {(matrix.arm, matrix.seed) for matrix in newer}
    published = [Matrix.from_json(entry) for entry in known]
    return [matrix for matrix in published if (matrix.arm, matrix.seed) not in again]


def main(
    work: Annotated[Path, typer.Option(help="Where data, runs and reports go.")] = WORK,
    seeds: Annotated[int, typer.Option(help="Runs of every arm.")] = 3,
    arms: Annotated[str | None, typer.Option(help="Which arms, with ';' between; all.")] = None,
    quick: Annotated[bool, typer.Option(help="Little of all, to see that it runs.")] = False,
    readme: Annotated[Path, typer.Option(help="The file whose table is renewed.")] = README,
) -> None:
    """Learn task after task, and report the success on all of them."""
    extent = QUICK if quick else FULL
    chosen = arms.split(";") if arms else list(ARMS)
    if quick:
        work, readme = apart(work, readme)
    data = work / "data"
    data.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        write_dataset(data / task, (task,), episodes=extent.demonstrations)
    bar = Output().progress
    rounds = extent.rounds or FAMILIES[FAMILY].rounds
    teacher = train_teacher(work / NAME, FAMILY, data / TASKS[0], rounds, bar)
    matrices = [
        Sequence(work, arm, seed, extent, teacher).run()
        for seed in range(1 if quick else seeds)
        for arm in chosen
    ]
    matrices = [*earlier_matrices(readme, matrices), *matrices]
    matrices.sort(key=lambda matrix: (list(ARMS).index(matrix.arm), matrix.seed))
    text = readme.read_text("utf-8") if readme.is_file() else ""
    title = f"### {len(TASKS)} tasks in a row ({FAMILY})"
    text = replaced(text, NAME, f"{title}\n\n{matrices_table(TASKS, matrices)}")
    readme.write_text(text, encoding="utf-8")
    add_results(readme, {NAME: [matrix.to_json() for matrix in matrices]})
    for arm in chosen:
        final = fmean(m.average for m in matrices if m.arm == arm)
        typer.echo(f"{arm}: average success at the end {final:.2f}")


if __name__ == "__main__":
    typer.run(main)
