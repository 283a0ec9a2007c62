"""LIBERO's suites one after the other (Spatial, Object, Goal, 10), with one policy, held or not.

    python examples/libero_lifelong/run.py --policy lerobot/smolvla_base --rename \\
        observation.images.image=observation.images.camera1,\\
        observation.images.image2=observation.images.camera2
    python examples/libero_lifelong/run.py --quick

The first needs a GPU, `lerobot[libero]` and the dataset; the second shows on the built-in demo that
everything runs. All is done by craft's own commands, which are printed. A run that was stopped is
continued; results.json in the work folder is renewed after every suite.
"""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

sys.path.insert(0, str(Path(__file__).parents[1] / "metaworld_forgetting"))

import typer

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from lerobot.datasets.lerobot_dataset import LeRobotDataset
from matrices import Matrix, matrices_table
from suites import LIBERO, STAND_IN, Suite, split_by_suite
from task_sequence import craft

from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.datasets import OLD
from craftcli.engine.run_folder import CHECKPOINTS
from craftcli.engine.summary_file import RunSummary
from craftcli.evaluation.results import Evaluation
from craftcli.sources import dataset_sources

DATASET = "HuggingFaceVLA/libero"
"""All four suites, in LeRobot's format."""
REPLAY = ("--mode", "replay", "--lambda-init", "1", "--lambda-lr", "0", "--surgery", "none")
ARMS = {
    "plain fine-tuning": ("--mode", "none"),
    "hidden + action": ("--mode", "hidden+action"),
    "hidden + action, no old data": ("--mode", "hidden+action"),
    "replay": REPLAY,
    "knowledge insulation": ("--mode", "none", "--insulate"),
}
OLD_FRAMES = ("hidden + action", "replay")
OLD_INSTRUCTIONS = ("hidden + action, no old data",)


@dataclass(frozen=True, kw_only=True)
class Course:
    """The suites, and the settings that all arms share."""

    suites: tuple[Suite, ...]
    data: dict[str, Path]
    work: Path
    policy: str
    train: tuple[str, ...]
    """Options of `craft train`."""
    evaluation: tuple[str, ...]
    """Options of `craft eval`."""

    def run(self, arm: str, seed: int) -> Iterator[Matrix]:
        """Learn every suite; success on all suites so far, after each."""
        folder = self.work / arm.replace(" ", "-") / f"seed-{seed}"
        # There is nothing to hold before the first suite, so that all arms share it.
        policy = self._learn(self.policy, 0, self.work / f"first-{seed}", seed, ("--mode", "none"))
        rows = [self._success(policy, 1)]
        for number in range(1, len(self.suites)):
            run = folder / f"{number}-{self.suites[number].name}"
            policy = self._learn(policy, number, run, seed, (*ARMS[arm], *self._old(arm, number)))
            rows.append(self._success(policy, number + 1))
            yield Matrix(arm=arm, seed=seed, rows=tuple(rows))

    def _learn(
        self, policy: str, number: int, run: Path, seed: int, options: Sequence[object]
    ) -> str:
        summary = RunSummary.read(run)
        if summary and summary.complete:
            return str(run)
        if (run / CHECKPOINTS / "last").exists():
            craft("train", "--resume", run)
        else:
            data = self.data[self.suites[number].name]
            craft(
                *("train", "--policy", policy, "--dataset", data, "--output", run, "--overwrite"),
                *("--seed", seed, *self.train, *options),
            )
        return str(run)

    def _old(self, arm: str, number: int) -> tuple[str, ...]:
        """What an arm keeps of the suites before: frames, instructions alone, or nothing."""
        old = self.suites[:number]
        if arm in OLD_FRAMES:
            # The same weight for each, whatever the length of its episodes.
            weight = ":1" if number > 1 else ""
            names = [f"{self.data[suite.name]}{weight}" for suite in old]
            return tuple(word for name in names for word in ("--old-dataset", name))
        if arm in OLD_INSTRUCTIONS:
            file = self.work / f"instructions-before-{self.suites[number].name}.txt"
            lines = [line for suite in old for line in suite.instructions()]
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
            return ("--old-tasks", str(file))
        return ()

    def _success(self, policy: str, count: int) -> tuple[float, ...]:
        """Success on the first suites, mean over the tasks of each."""
        file = Path(policy) / "success.json"
        *old, new = self.suites[:count]
        if not file.is_file():
            before = [word for suite in old for word in ("--old-env", suite.environment)]
            craft("eval", policy, *before, "--env", new.environment, *self.evaluation, "-o", file)
        found = Evaluation.load(file).success
        return tuple(
            fmean(
                task.rate
                for task in found
                if task.environment.partition("/")[0] == suite.environment
            )
            for suite in (*old, new)
        )


def main(
    policy: Annotated[str, typer.Option(help="Where it starts from.")] = "lerobot/smolvla_base",
    dataset: Annotated[str, typer.Option(help="A dataset with all suites.")] = DATASET,
    work: Annotated[Path, typer.Option(help="Where all goes.")] = Path("runs/libero_lifelong"),
    arms: Annotated[str | None, typer.Option(help="Which arms, with ';' between; all.")] = None,
    seeds: Annotated[str, typer.Option(help="Runs of every arm.")] = "1",
    steps: Annotated[int, typer.Option(help="Of each suite.")] = 20_000,
    episodes: Annotated[int, typer.Option(help="Of each task.")] = 20,
    rename: Annotated[str | None, typer.Option(help="The dataset's names to the policy's.")] = None,
    device: Annotated[str, typer.Option(help="Where it runs.")] = "cuda",
    more: Annotated[str, typer.Option("--train", help="More options of craft train.")] = "",
    quick: Annotated[bool, typer.Option(help="Little of all, on the built-in demo.")] = False,
) -> None:
    """Learn suite after suite, and report the success on all of them."""
    suites = LIBERO
    if not quick:
        # Read when the simulator is imported, which is later.
        os.environ.setdefault("MUJOCO_GL", "egl")
    else:
        suites, policy, dataset = STAND_IN, str(TEACHER_FOLDER), OLD.repo_id
        steps, episodes, device = 2, 2, "cpu"
        more = f"{more} --batch-size 4 --anchor-samples 16"
    work.mkdir(parents=True, exist_ok=True)
    (source,) = dataset_sources(dataset)
    whole = LeRobotDataset(source.repo_id, root=source.place, revision=source.revision)
    data = split_by_suite(whole, suites, work / "data", most=8 if quick else None)
    renamed = ("--rename", rename) if rename else ()
    course = Course(
        suites=suites,
        data=data,
        work=work,
        policy=policy,
        train=("--steps", str(steps), "--device", device, *renamed, *shlex.split(more)),
        evaluation=("--episodes", str(episodes), "--batch-size", "10", "--device", device),
    )
    finished: list[Matrix] = []
    for seed in map(int, seeds.split(",")):
        for arm in arms.split(";") if arms else ARMS:
            for matrix in course.run(arm, seed):
                entries = [found.to_json() for found in (*finished, matrix)]
                (work / "results.json").write_text(json.dumps(entries, indent=2), "utf-8")
            finished.append(matrix)
    typer.echo(matrices_table([suite.name for suite in suites], finished))


if __name__ == "__main__":
    typer.run(main)
