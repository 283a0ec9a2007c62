"""`craft compare`: compare runs in a table, plots and a page; run a sweep first."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from craftcli.cli.options import AsJson, Debug, add_command, guarded
from craftcli.cli.output import Output
from craftcli.cli.quiet import quiet_libraries
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE, CraftError

if TYPE_CHECKING:
    from craftcli.compare.compare import Comparison
    from craftcli.sweeps.progress import Job
    from craftcli.sweeps.runner import SweepResult
    from craftcli.sweeps.sweep_file import SweepSpec

_TITLE = "Comparison"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(
        app,
        "compare",
        compare,
        help="Compare runs: a table, the trade-off of old and new success, training curves, and a "
        "page with all of it.\n\nRuns that differ in their seed only are one arm. --sweep first "
        "runs the arms and seeds of a file, and continues a sweep that was interrupted.",
        examples=(
            "craft compare runs/*",
            "craft compare runs/none runs/hidden teacher.json --output report",
            "craft compare runs/* --old metaworld:reach-v3 --new metaworld:door-open-v3 --json",
            "craft compare --sweep sweep.toml",
        ),
    )


def compare(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Runs, policies of craft merge, folders of sweeps, or the file of an evaluation.",
        ),
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run the sweep of this TOML file first, then compare."),
    ] = None,
    old: Annotated[
        list[str] | None,
        typer.Option(metavar="ENV", help="Environment of the old skill. Repeatable."),
    ] = None,
    new: Annotated[
        list[str] | None,
        typer.Option(metavar="ENV", help="Environment of the new skill. Repeatable."),
    ] = None,
    output_folder: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FOLDER", help="Folder of the report. Default: compare."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier report of other runs.")
    ] = False,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Heading of the page.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare runs, or run a sweep and compare that."""

    def act(output: Output) -> None:
        _check_sources(runs, sweep)
        from craftcli.compare.compare import compare_runs
        from craftcli.compare.report import check_replaced, check_report_folder, write_report
        from craftcli.compare.runs import Roles

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
        replaced = check_replaced(comparison, folder, overwrite=overwrite)
        written = write_report(comparison, folder, title=heading)
        output.say(f"{'Replaced' if replaced else 'Wrote'} {written.page}")
        output.next(f"open {written.page} in a browser.")
        output.json(comparison.to_json())
        for error in comparison.damage:
            output.error(error)
        failures = [*result.failures.values()] if result else []
        if comparison.damage or any(e.exit_code == EXIT_CHECK_FAILED for e in failures):
            raise typer.Exit(EXIT_CHECK_FAILED)
        if failures:
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
            else "a sweep compares its own runs.",
            fix="write craft compare runs/*, or craft compare --sweep FILE.toml.",
            exit_code=EXIT_USAGE,
        )


def _run_sweep(file: Path, output: Output) -> tuple["SweepSpec", "SweepResult"]:
    from craftcli.sweeps.sweep_file import read_sweep

    spec = read_sweep(file)
    with output.status("Loading ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.sweeps.runner import run_sweep

    try:
        result = run_sweep(
            spec,
            on_job=lambda job: output.note(_job(job)),
            on_failure=lambda what, error: _show_failure(what, error, output),
            bar=output.progress,
        )
    except KeyboardInterrupt:
        output.warn(f"interrupted; craft compare --sweep {file} continues.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if result.interrupted:
        output.warn(f"interrupted, and saved; craft compare --sweep {file} continues.")
        raise typer.Exit(EXIT_INTERRUPTED)
    output.note(f"{result.done} jobs done, {result.kept} kept from before")
    if result.failures:
        output.warn(f"failed: {', '.join(result.failures)}.")
    for what in result.skipped:
        output.warn(f"left out: {what}.")
    return spec, result


def _show_failure(what: str, error: CraftError, output: Output) -> None:
    output.warn(f"failed: {what}; the sweep continues with the jobs that do not need it.")
    output.error(error)


def _job(job: "Job") -> str:
    from craftcli.compare.table import duration

    left = "" if job.left_s is None else f", about {duration(job.left_s)} left"
    return f"{job.number}/{job.total} {job.what}{left}"


def _show(comparison: "Comparison", output: Output) -> None:
    from craftcli.compare.table import used_columns

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
