"""`craft compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from craftcli.cli.options import AsJson, Debug, epilog, guarded
from craftcli.cli.output import Output
from craftcli.cli.quiet import quiet_libraries
from craftcli.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE, CraftError

if TYPE_CHECKING:
    from craftcli.report.compare import Comparison
    from craftcli.sweeps.progress import Job
    from craftcli.sweeps.running import SweepResult
    from craftcli.sweeps.spec import SweepSpec

_TITLE = "Comparison"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "compare",
        help="Put runs side by side: a table, the trade-off of old and new success, curves of "
        "training, and a page with all of it. Seeds of the same settings become one arm. "
        "--sweep FILE.toml first runs the arms and seeds of a file; interrupted, it goes on.",
        epilog=epilog(
            "craft compare runs/*",
            "craft compare runs/none runs/hidden teacher.json --output report",
            "craft compare runs/* --old metaworld:reach-v3 --new metaworld:door-open-v3 --json",
            "craft compare --sweep sweep.toml",
        ),
    )(compare)


def compare(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...",
            help="Runs, merged policies, folders of sweeps, a file of the teacher's evaluation.",
        ),
    ] = None,
    sweep: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Run this first, then compare.")
    ] = None,
    old: Annotated[
        list[str] | None,
        typer.Option(metavar="ENV", help="An environment of the old skill; repeatable."),
    ] = None,
    new: Annotated[
        list[str] | None,
        typer.Option(metavar="ENV", help="An environment of the new skill; repeatable."),
    ] = None,
    output_folder: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FOLDER", help="Without it: compare."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare runs, or run a sweep and compare that."""

    def act(output: Output) -> None:
        _check_sources(runs, sweep)
        from craftcli.report.compare import compare_runs
        from craftcli.report.compare_files import check_report_folder, write_report
        from craftcli.report.compare_runs import Roles

        folder = output_folder or Path("compare")
        check_report_folder(folder)
        result = None
        heading, sources = title or _TITLE, runs or []
        if sweep:
            spec, result = _run_sweep(sweep, output)
            heading, sources = title or spec.title, [spec.output]
        roles = Roles(old=tuple(old or ()), new=tuple(new or ())) if old or new else None
        comparison = compare_runs(sources, roles)
        _show(comparison, output)
        written = write_report(comparison, folder, title=heading)
        output.say(f"Wrote {written.page}")
        output.json(comparison.to_json())
        if result and result.failures:
            raise typer.Exit(EXIT_ERROR)

    guarded(act, as_json=as_json, debug=debug)


def _check_sources(runs: list[Path] | None, sweep: Path | None) -> None:
    if bool(runs) == bool(sweep):
        raise CraftError(
            "There is nothing to compare."
            if not runs
            else "Runs and a sweep cannot be compared at once.",
            why="neither runs nor a sweep were given."
            if not runs
            else "a sweep compares what it has run.",
            fix="write craft compare runs/*, or craft compare --sweep FILE.toml.",
            exit_code=EXIT_USAGE,
        )


def _run_sweep(file: Path, output: Output) -> tuple["SweepSpec", "SweepResult"]:
    from craftcli.sweeps.spec import read_sweep

    spec = read_sweep(file)
    with output.status("Loading ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.sweeps.running import run_sweep

    try:
        result = run_sweep(spec, on_job=lambda job: output.note(_job(job)), bar=output.progress)
    except KeyboardInterrupt:
        output.warn(f"interrupted; craft compare --sweep {file} goes on.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if result.interrupted:
        output.warn(f"interrupted, and saved; craft compare --sweep {file} goes on.")
        raise typer.Exit(EXIT_INTERRUPTED)
    output.note(f"{result.done} jobs done, {result.kept} kept from before")
    for what, error in result.failures.items():
        output.warn(f"failed: {what}.")
        output.error(error)
    for what in result.skipped:
        output.warn(f"left out: {what}.")
    return spec, result


def _job(job: "Job") -> str:
    from craftcli.report.compare_table import duration

    left = "" if job.left_s is None else f", about {duration(job.left_s)} left"
    return f"{job.number}/{job.total} {job.what}{left}"


def _show(comparison: "Comparison", output: Output) -> None:
    from craftcli.report.compare_table import used_columns

    columns = used_columns(comparison)
    rows = [
        [
            "T" if row.arm.number == 0 else str(row.arm.number),
            row.arm.label,
            str(row.arm.seeds),
            *(column.cell(row) for column in columns),
        ]
        for row in comparison.rows
    ]
    output.grid(["", "arm", "seeds", *(column.title for column in columns)], rows)
    for note in comparison.notes:
        output.warn(note)
