"""Which hidden states of a policy hold its behaviour? Measured for every family.

    uv run python examples/family_defaults/run.py                          # tables.md
    uv run python examples/family_defaults/run.py --families smolvla,act   # some of them
    uv run python examples/family_defaults/run.py --quick                  # to see that it runs

A tiny real policy of each family learns an old skill, then is fine-tuned on a new one that asks
for the opposite: plainly, held by the hidden states of one stack or another, and held by its
actions. What counts is how far the actions that it chooses on held-out old frames have moved.
Stopped, it goes on where it was.
"""

import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The tiny policies are those of the tests: real LeRobot classes with every width made small.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/helpers"))

import typer

from craftcli.cli.quiet import quiet_libraries

quiet_libraries(debug=False)

from experiment import FULL, QUICK, Row, compare
from families import FAMILIES

from craftcli.policies.families.registry import adapter_for
from craftcli.sweeps.progress import Job


def table(name: str, rows: list[Row]) -> str:
    """One family in Markdown, a row to an arm, figures over its seeds."""
    adapter = adapter_for(name)
    default = [held.name for held in FAMILIES[name].held if held.is_default_of(adapter)]
    lines = [
        "| what is held | old: moved | old: error | new: error | new: loss |",
        "|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(row.arm for row in rows):
        own = [row for row in rows if row.arm == arm]
        label = f"**{arm}** (default)" if arm in default else arm
        cells = [
            _figure([getattr(row, key) for row in own])
            for key in ("moved", "old_error", "new_error", "new_loss")
        ]
        if all(row.old_error is None for row in own):
            cells[0] = "refused"
        lines.append(f"| {' | '.join([label, *cells])} |")
    return "\n".join(lines)


def _figure(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    spread = (max(known) - min(known)) / 2
    return f"{fmean(known):.3g}" + (f" ± {spread:.2g}" if len(known) > 1 else "")


def main(
    families: Annotated[str, typer.Option(help="Which families.")] = ",".join(FAMILIES),
    seeds: Annotated[int | None, typer.Option(help="Runs of every arm; 2.")] = None,
    quick: Annotated[bool, typer.Option(help="A few steps, to see that it runs.")] = False,
    work: Annotated[Path, typer.Option(help="Where runs go.")] = Path("runs/family_defaults"),
    out: Annotated[Path, typer.Option(help="The figures; families in it are renewed.")] = Path(
        "results.json"
    ),
) -> None:
    """Measure, print a table for each family, and keep the figures."""
    extent = QUICK if quick else FULL
    extent = replace(extent, seeds=seeds or extent.seeds)
    results = json.loads(out.read_text("utf-8")) if out.is_file() else {}
    for name in families.split(","):
        started = time.perf_counter()

        def on_job(job: Job, name: str = name) -> None:
            typer.echo(f"{name} {job.number}/{job.total} {job.what}", err=True)

        rows = compare(work / ("quick" if quick else "full"), name, extent, on_job)
        typer.echo(f"### {name}\n\n{table(name, rows)}\n")
        typer.echo(f"{name}: {time.perf_counter() - started:.0f} s", err=True)
        results[name] = [asdict(row) for row in rows]
        out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
