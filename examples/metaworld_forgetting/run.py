"""Does retention keep the old skill? Measured in closed loop on Meta-World.

    uv run --extra metaworld python examples/metaworld_forgetting/run.py           # tables.md
    uv run --extra metaworld python examples/metaworld_forgetting/run.py --quick   # that it runs

Records the scripted experts, trains a teacher on the old tasks, fine-tunes it on the new one in
every way of arms.toml, rolls all policies out, and reports. Stopped, it goes on where it was.
"""

import os
from pathlib import Path
from typing import Annotated

# The policies are too small for threads, and sums in another order would change the figures.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import typer

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from arms import GROUPS
from bench import FULL, PAIRS, QUICK, Bench
from reporting import TABLES, WORK, apart, publish

from craftcli.cli.output import Output
from craftcli.compare.table import duration
from craftcli.sweeps.progress import Job


def main(
    work: Annotated[Path, typer.Option(help="Where data, runs and reports go.")] = WORK,
    pairs: Annotated[str | None, typer.Option(help="Which pairs of tasks; all.")] = None,
    families: Annotated[str, typer.Option(help="Which families of policies.")] = "act",
    groups: Annotated[str | None, typer.Option(help="Which arms of arms.toml; all.")] = None,
    arms: Annotated[
        str | None, typer.Option(help="Which arms of the groups, with ';' between; all.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of every arm; 3.")] = None,
    tuning: Annotated[
        bool, typer.Option(help="Take the seed and episodes that settings are chosen with.")
    ] = False,
    quick: Annotated[bool, typer.Option(help="Little of all, to see that it runs.")] = False,
    tables: Annotated[Path, typer.Option(help="The file whose tables are renewed.")] = TABLES,
) -> None:
    """Measure and report."""
    output = Output()

    def on_job(job: Job) -> None:
        left = "" if job.left_s is None else f", about {duration(job.left_s)} left"
        output.note(f"{job.number}/{job.total} {job.what}{left}")

    extent = QUICK if quick else FULL
    if quick:
        work, tables = apart(work, tables)
    elif tuning and tables == TABLES:
        tables = work / "tuning.md"
    chosen = groups.split(",") if groups else extent.groups
    names = arms.split(";") if arms else None
    known = {entry["name"] for group in chosen for entry in GROUPS[group]}
    if unknown := set(names or ()) - known:
        raise typer.BadParameter(f"no such arm in {','.join(chosen)}: {'; '.join(sorted(unknown))}")
    specs = {}
    for pair in pairs.split(",") if pairs else extent.pairs:
        for family in families.split(","):
            bench = Bench(work, PAIRS[pair], family, extent, on_job=on_job, bar=output.progress)
            specs |= bench.compare(chosen, seeds or extent.seeds, names, tuning=tuning)
    publish(specs, tables, work / "reports")


if __name__ == "__main__":
    typer.run(main)
