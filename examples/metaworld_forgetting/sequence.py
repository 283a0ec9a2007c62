"""Five tasks in a row, each learned by a policy that is held to what it knew before.

    uv run --extra metaworld python examples/metaworld_forgetting/sequence.py
    uv run --extra metaworld python examples/metaworld_forgetting/sequence.py --quick

The first makes the table of tables.md, the second shows that it runs. After every task the policy
answers for anchors of that task; the caches of all tasks so far are joined. Everything is done by
craft's own commands, which are printed. A run that was stopped is continued.
"""

import os
from functools import partial
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
from bench import FULL, QUICK, REPORTED_EPISODES, Extent
from experts import write_dataset
from matrices import earlier_matrices, matrices_table
from reporting import TABLES, WORK, add_results, apart, published, replaced
from task_sequence import Anchors, Arm, Course, TaskSequence, craft
from teacher import train_teacher

from craftcli.cli.output import Output
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
# Half as many as task samples: by default there are four, one of each old task in the end, whose
# gradient is mostly noise. Then L_ret ended at 4 times ε.
ANCHORS = ("--anchor-batch-size", "16")
HELD = ("--mode", "hidden+action", *ANCHORS)
# As it was tuned on the pairs; its anchors come with the experts' labels.
REPLAY = (
    *("--mode", "replay", "--lambda-init", "1", "--lambda-lr", "0", "--surgery", "none"),
    *ANCHORS,
)
FIRST_SEED = 4
"""Seeds below were used to find out what makes it fail."""
ARMS = {
    "plain fine-tuning": Arm(anchors=Anchors.NOTHING, train=("--mode", "none")),
    "hidden + action": Arm(anchors=Anchors.FRAMES, train=HELD),
    "hidden + action, 16 frames a task": Arm(anchors=Anchors.FEW_FRAMES, train=HELD),
    "replay": Arm(anchors=Anchors.LABELLED, train=REPLAY),
}


def measured(extent: Extent, policy: Path, file: Path, count: int) -> tuple[float, ...]:
    """Success of a policy on the first tasks."""
    environments = [f"metaworld:{task}" for task in TASKS[:count]]
    if not file.is_file():
        craft(
            *("eval", policy, *(part for env in environments for part in ("--env", env))),
            *("--episodes", extent.episodes, "--max-steps", extent.max_steps),
            *("--seed", REPORTED_EPISODES, "--batch-size", 10, "--no-teacher-success", "-o", file),
        )
    rates = {found.environment: found.rate for found in Evaluation.load(file).success}
    return tuple(rates[env] for env in environments)


def main(
    work: Annotated[Path, typer.Option(help="Where data, runs and reports go.")] = WORK,
    seeds: Annotated[int, typer.Option(help="Runs of every arm.")] = 3,
    arms: Annotated[str | None, typer.Option(help="Which arms, with ';' between; all.")] = None,
    quick: Annotated[bool, typer.Option(help="Little of all, to see that it runs.")] = False,
    tables: Annotated[Path, typer.Option(help="The file whose table is renewed.")] = TABLES,
) -> None:
    """Learn task after task, and report the success on all of them."""
    extent = QUICK if quick else FULL
    chosen = arms.split(";") if arms else list(ARMS)
    if quick:
        work, tables = apart(work, tables)
    data = work / "data"
    data.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        write_dataset(data / task, (task,), episodes=extent.demonstrations)
    rounds = extent.rounds or FAMILIES[FAMILY].rounds
    teacher = train_teacher(work / NAME, FAMILY, data / TASKS[0], rounds, Output().progress)
    course = Course(
        folder=work / NAME,
        data=data,
        tasks=TASKS,
        first=teacher,
        measure=partial(measured, extent),
        steps=extent.steps or STEPS,
        lr=FAMILIES[FAMILY].lr,
        frames=(extent.anchors or FAMILIES[FAMILY].anchors) // (len(TASKS) - 1),
        quick=quick,
    )
    matrices = [
        list(TaskSequence(course, arm, ARMS[arm], seed).run())[-1]
        for seed in range(FIRST_SEED, FIRST_SEED + (1 if quick else seeds))
        for arm in chosen
    ]
    matrices = [*earlier_matrices(published(tables, NAME) or [], matrices), *matrices]
    matrices.sort(key=lambda matrix: (list(ARMS).index(matrix.arm), matrix.seed))
    text = tables.read_text("utf-8") if tables.is_file() else ""
    title = f"### {len(TASKS)} tasks in a row ({FAMILY})"
    text = replaced(text, NAME, f"{title}\n\n{matrices_table(TASKS, matrices)}")
    tables.write_text(text, encoding="utf-8")
    add_results(tables, {NAME: [matrix.to_json() for matrix in matrices]})
    for arm in chosen:
        final = fmean(m.average for m in matrices if m.arm == arm)
        typer.echo(f"{arm}: average success at the end {final:.2f}")


if __name__ == "__main__":
    typer.run(main)
