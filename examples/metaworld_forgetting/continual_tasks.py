"""The tasks of Continual World: their data, a policy for each alone, and which of them are kept."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from beginnings import FAMILIES, write_fresh
from bench import TUNING_SEED
from closed_loop import ClosedLoop
from experts import EXPERT_FILE, write_dataset
from matrices import Matrix
from task_sequence import Arm, Course, TaskSequence, train
from views import WORLD, View

from craftcli.evaluation.rollouts import FIRST_SEED

TASKS = tuple(
    f"{name}-v3"
    for name in (
        "hammer",
        "push-wall",
        "faucet-close",
        "push-back",
        "stick-pull",
        "handle-press-side",
        "push",
        "shelf-place",
        "window-close",
        "peg-unplug-side",
    )
)
FAMILY = "act"
JOINT = "joint training"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much work goes into everything."""

    tasks: tuple[str, ...] = TASKS
    demonstrations: int = 60
    alone_steps: int = 3000
    """Of a policy that learns one task alone; the first task's is where every arm begins."""
    steps: int = 3000
    """Of each further task; with 1000, plain fine-tuning itself learns 0.53 of them."""
    lr: float = 1e-3
    frames: int = FAMILIES[FAMILY].anchors
    """Of each old task, for arms that keep frames as they are."""
    least_success: float = 0.6
    """Of a task's expert and of its policy; a task with less is left out."""
    on_the_way: int = 20
    in_the_end: int = 50
    """Episodes of a task just after it was learned, and of all in the end."""
    max_steps: int = 200
    quick: bool = False


FULL = Effort()
QUICK = Effort(
    tasks=TASKS[:3],
    demonstrations=2,
    alone_steps=5,
    steps=5,
    frames=6,
    least_success=0,
    on_the_way=2,
    in_the_end=3,
    max_steps=5,
    quick=True,
)


class ContinualTasks:
    """The tasks that the rule keeps; data and policies that are there are not made again."""

    def __init__(self, folder: Path, effort: Effort) -> None:
        self.folder = folder
        self._effort = effort
        self._data = folder / "data"
        self._data.mkdir(parents=True, exist_ok=True)
        # A task keeps its number when others are left out.
        self._view = View(numbered=effort.tasks)
        self._loop = ClosedLoop(view=self._view, max_steps=effort.max_steps)
        self.expert = {task: self._record(task) for task in effort.tasks}
        self.alone = {task: self._learn_alone(task) for task in effort.tasks}
        self.tasks = tuple(
            task
            for task in effort.tasks
            if min(self.expert[task], self.alone[task]) >= effort.least_success
        )
        self.left_out = tuple(task for task in effort.tasks if task not in self.tasks)

    def in_turn(self, name: str, arm: Arm, seed: int) -> TaskSequence:
        """The tasks one after the other."""
        course = Course(
            folder=self.folder,
            data=self._data,
            tasks=self.tasks,
            first=self._policy_of(self.tasks[0]),
            measure=lambda policy, file, count: self._measure(policy, file, count, seed),
            steps=self._effort.steps,
            lr=self._effort.lr,
            frames=self._effort.frames,
            quick=self._effort.quick,
            fixed=WORLD,
        )
        return TaskSequence(course, name, arm, seed)

    def jointly(self, seed: int) -> Matrix:
        """A fresh policy on the data of all tasks, with as many steps as they have in turn."""
        run = self.folder / JOINT.replace(" ", "-") / f"seed-{seed}" / "run"
        steps = self._effort.alone_steps + self._effort.steps * (len(self.tasks) - 1)
        self._train_fresh(self.tasks, run, steps=steps, seed=seed)
        row = self._measure(run, run / "success.json", len(self.tasks), seed)
        return Matrix(arm=JOINT, seed=seed, rows=(row,))

    def _record(self, task: str) -> float:
        """Record the expert; the share of scenes in which it succeeds."""
        data = self._data / task
        write_dataset(data, (task,), episodes=self._effort.demonstrations, view=self._view)
        rates: dict[str, float] = json.loads((data / EXPERT_FILE).read_text("utf-8"))
        return rates[task]

    def _policy_of(self, task: str) -> Path:
        return self.folder / "alone" / task / "run"

    def _learn_alone(self, task: str) -> float:
        run = self._policy_of(task)
        self._train_fresh([task], run, steps=self._effort.alone_steps, seed=0)
        episodes = {task: self._effort.in_the_end}
        return self._loop.measure(run, run / "success.json", episodes)[0]

    def _train_fresh(self, tasks: Sequence[str], run: Path, *, steps: int, seed: int) -> None:
        run.parent.mkdir(parents=True, exist_ok=True)
        data = [self._data / task for task in tasks]
        fresh = write_fresh(FAMILY, run.with_name("fresh"), data, seed=seed, view=self._view)
        options = ("--mode", "none", "--steps", steps, "--lr", self._effort.lr, "--seed", seed)
        train(fresh, data, run, *options)

    def _measure(self, policy: Path, file: Path, count: int, seed: int) -> tuple[float, ...]:
        """Success on the first tasks; the last of them was just learned."""
        effort, tasks = self._effort, self.tasks[:count]
        over = count == len(self.tasks)
        episodes = dict.fromkeys(tasks, effort.in_the_end if over else effort.on_the_way)
        episodes[tasks[-1]] = effort.in_the_end
        tuning = seed == TUNING_SEED
        loop = replace(self._loop, first_episode=FIRST_SEED) if tuning else self._loop
        return loop.measure(policy, file, episodes)
