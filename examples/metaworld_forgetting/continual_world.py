"""Continual World's ten tasks (CW10), learned by imitation, one after the other, with one policy.

    uv run --extra metaworld python examples/metaworld_forgetting/continual_world.py
    uv run --extra metaworld python examples/metaworld_forgetting/continual_world.py --quick
    ... continual_world.py --arms "plain fine-tuning;hidden + action" --seeds 1,2,3

Tasks and their order are those of Wolczyk et al. 2021 (in Meta-World's version 3). The policy is an
ACT over states that learns from 60 demonstrations of each task. Push and push-wall cannot be told
apart by their states (the nearest scenes of the two differ by 0.05 deviations), so the policy reads
the number of the task beside the state, as ten one-hot numbers, in every arm. Continual World
itself gives that number to its policies.

A rule that was fixed before anything was measured: a task is left out, and named, if its expert
succeeds in less than 0.6 of the scenes, or a policy that learns this task alone (3000 steps).

The policy of the first task is that policy; each further task has 3000 steps. Joint training is a
fresh policy on all data, with as many steps in total. Success is measured over 50 episodes just
after a task is learned and in the end, over 20 in between, always over the same ones.

- average: success over all tasks in the end.
- forgetting: success just after a task was learned minus success in the end, mean over the tasks.
- forward transfer: success just after a task was learned minus that of the policy that learned it
  alone. (Continual World compares areas under training curves; there are no curves here.)

Seed 0 is for choosing settings, such as the weight of EWC, on episodes of its own (`--first 4`: on
the first four tasks); reported are others. A run that was stopped is continued, and results are
written after every task.
"""

import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

# The policies are too small for threads, and sums in another order would change the figures.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import typer

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from beginnings import FAMILIES
from bench import TUNING_SEED
from continual_tasks import FAMILY, FULL, JOINT, QUICK, ContinualTasks
from matrices import Matrix, earlier_matrices, matrices_table
from matrix_plot import draw_matrices
from reporting import TABLES, WORK, add_results, apart, published, replaced
from sequence import HELD, REPLAY
from task_sequence import Anchors, Arm

NAME = "continual-world-act"
PLAIN = ("--mode", "none")
EWC = ("--mode", "ewc", "--lambda-lr", "0", "--lambda-max", "100", "--surgery", "none")
LORA = f"r=8,targets={FAMILIES[FAMILY].lora_targets}"
ARMS: dict[str, Arm | None] = {
    "plain fine-tuning": Arm(anchors=Anchors.NOTHING, train=PLAIN),
    "hidden + action": Arm(anchors=Anchors.FRAMES, train=HELD),
    "hidden + action, 16 frames a task": Arm(anchors=Anchors.FEW_FRAMES, train=HELD),
    "hidden + action, 16 frames a task, ε 0.01, 32 anchors a step": Arm(
        anchors=Anchors.FEW_FRAMES,
        train=("--mode", "hidden+action", "--anchor-batch-size", "32", "--epsilon-start", "0.01"),
    ),
    "hidden + action, 16 frames a task, slower": Arm(
        anchors=Anchors.FEW_FRAMES, train=HELD, slower=True
    ),
    "hidden + action, no old frames": Arm(anchors=Anchors.STATISTICS, train=HELD),
    "hidden + action, no old frames, slower": Arm(
        anchors=Anchors.STATISTICS, train=HELD, slower=True
    ),
    "replay": Arm(anchors=Anchors.LABELLED, train=REPLAY),
    "EWC, λ 0.1": Arm(anchors=Anchors.LABELLED, train=(*EWC, "--lambda-init", "0.1")),
    "EWC, λ 1": Arm(anchors=Anchors.LABELLED, train=(*EWC, "--lambda-init", "1")),
    "EWC, λ 10": Arm(anchors=Anchors.LABELLED, train=(*EWC, "--lambda-init", "10")),
    "EWC, λ 100": Arm(anchors=Anchors.LABELLED, train=(*EWC, "--lambda-init", "100")),
    "LoRA": Arm(anchors=Anchors.NOTHING, train=PLAIN, once=("--lora", LORA)),
    JOINT: None,
}


def publish(tasks: ContinualTasks, newer: list[Matrix], tables: Path, *, picture: bool) -> None:
    """Renew the figures beside the tables, and its table; the picture takes a second."""
    before = published(tables, NAME) or {}
    matrices = [*earlier_matrices(before.get("matrices", []), newer), *newer]
    matrices.sort(key=lambda matrix: (list(ARMS).index(matrix.arm), matrix.seed))
    results: dict[str, Any] = {
        "tasks": tasks.tasks,
        "left_out": tasks.left_out,
        "expert": tasks.expert,
        "alone": tasks.alone,
        "matrices": [matrix.to_json() for matrix in matrices],
    }
    add_results(tables, {NAME: results})
    _renew_section(tasks, matrices, tables, picture=picture)


def _renew_section(
    tasks: ContinualTasks, matrices: list[Matrix], tables: Path, *, picture: bool
) -> None:
    """The part of the tables about finished runs; runs for tuning are in the figures alone."""
    reported = [matrix for matrix in matrices if matrix.seed != TUNING_SEED]
    done = [matrix for matrix in reported if len(matrix.rows[-1]) == len(tasks.tasks)]
    if not done:
        return
    alone = [tasks.alone[task] for task in tasks.tasks]
    parts = [
        f"### Continual World: {len(tasks.tasks)} tasks in a row ({FAMILY})",
        matrices_table(tasks.tasks, done, alone),
        _alone_line(tasks),
    ]
    image = tables.with_name(f"{NAME}.png")
    if picture:
        draw_matrices(tasks.tasks, done, image)
    if image.is_file():
        parts.append(f"![success on every task after each task]({image.name})")
    if unfinished := [matrix for matrix in reported if matrix not in done]:
        listed = [f"{m.arm}, seed {m.seed} ({len(m.rows)} tasks)" for m in unfinished]
        parts.append(f"Unfinished: {'; '.join(listed)}.")
    text = tables.read_text("utf-8") if tables.is_file() else ""
    tables.write_text(replaced(text, NAME, "\n\n".join(parts)), encoding="utf-8")


def _alone_line(tasks: ContinualTasks) -> str:
    """What experts and policies of one task reach, and which tasks that leaves out."""
    listed = [
        f"{task.removesuffix('-v3')} {tasks.expert[task]:.2f} / {rate:.2f}"
        for task, rate in tasks.alone.items()
    ]
    names = ", ".join(task.removesuffix("-v3") for task in tasks.left_out) or "none"
    return f"Expert / policy of that task alone: {'; '.join(listed)}. Left out: {names}."


def main(
    work: Annotated[Path, typer.Option(help="Where data, runs and reports go.")] = WORK,
    seeds: Annotated[str, typer.Option(help="Runs of every arm; 0 is for tuning.")] = "1,2,3",
    arms: Annotated[str | None, typer.Option(help="Which arms, with ';' between; all.")] = None,
    steps: Annotated[int | None, typer.Option(help="Of each further task; 3000.")] = None,
    first: Annotated[int | None, typer.Option(help="Learn so many tasks; all.", min=2)] = None,
    quick: Annotated[bool, typer.Option(help="Little of all, to see that it runs.")] = False,
    tables: Annotated[Path, typer.Option(help="The file whose table is renewed.")] = TABLES,
) -> None:
    """Learn task after task, and report the success on all of them."""
    effort = QUICK if quick else FULL
    if steps is not None:
        effort = replace(effort, steps=steps)
    if quick:
        work, tables = apart(work, tables)
    tasks = ContinualTasks(work / NAME, effort)
    finished: list[Matrix] = []
    for seed in map(int, seeds.split(",")):
        for name in arms.split(";") if arms else ARMS:
            arm = ARMS[name]
            found = [tasks.jointly(seed)] if arm is None else tasks.in_turn(name, arm, seed).run()
            # The first task was learned before.
            for matrix in islice(found, None if first is None else first - 1):
                publish(tasks, [*finished, matrix], tables, picture=False)
            finished.append(matrix)
            publish(tasks, finished, tables, picture=True)
            typer.echo(f"{name}, seed {seed}: average success in the end {matrix.average:.2f}")


if __name__ == "__main__":
    typer.run(main)
