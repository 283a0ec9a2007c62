"""`craft cache inspect`: show what a cache holds, check it, compare it, draw it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from craftcli.cli.cache.inspect_tables import (
    describe_match,
    describe_row,
    show_matches,
    show_rerun,
    show_summary,
)
from craftcli.cli.next_steps import train_on
from craftcli.cli.options import add_settings_command
from craftcli.cli.output import Output
from craftcli.cli.quiet import quiet_libraries
from craftcli.config.inspect import InspectConfig
from craftcli.config.settings import Source
from craftcli.demo.defaults import is_of_demo
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.locations import Location

if TYPE_CHECKING:
    from craftcli.cache.identity import FieldMatch
    from craftcli.cache.reading.reader import CacheReader
    from craftcli.evaluation.cache_check import RowCheck


def register(app: typer.Typer) -> None:
    """Add the command to `craft cache`."""
    add_settings_command(
        app,
        "inspect",
        InspectConfig,
        inspect,
        help="Show what a cache holds and where it came from. Check it, compare it with a policy "
        "and a dataset, or draw it.",
        examples=(
            "craft cache inspect",
            "craft cache inspect anchors.zarr --verify --json",
            "craft cache inspect anchors.zarr --policy outputs/my_policy --dataset me/old_task",
            "craft cache inspect anchors.zarr --plot anchors.png",
        ),
        config_file=False,
    )


@dataclass(frozen=True, kw_only=True)
class _Findings:
    """Results of comparing a cache with a policy and a dataset."""

    matches: "tuple[FieldMatch, ...]" = ()
    checks: "tuple[RowCheck, ...]" = ()
    not_run: str | None = None
    changed: bool = False

    def to_json(self, config: InspectConfig) -> dict[str, Any]:
        """As JSON values; null for a check that the user did not choose."""
        compared = config.policy or config.dataset
        rerun = {"not_run": self.not_run, "rows": [check.to_json() for check in self.checks]}
        return {
            "identity": [match.to_json() for match in self.matches] if compared else None,
            "rerun": rerun if config.verify else None,
        }


def inspect(source: Source[InspectConfig], output: Output) -> None:
    """Show a cache and run the chosen checks; a check that fails is an error."""
    from craftcli.cache.summary import summarize

    config = source.settings
    if config.plot:
        # A plot that cannot be written should fail before the long work.
        from craftcli.plots.cache_plot import plot_cache
        from craftcli.plots.png import check_plot_file

        check_plot_file(config.plot)
    reader = _open(config.path, output)
    if config.verify:
        _require_sound(reader.verify(), config.path)
    summary = summarize(reader)
    show_summary(summary, output)
    if config.verify:
        output.say(f"Verified: all {summary.chunks} chunks match their checksums.")
    findings = _compare(reader, config, output)
    show_matches(findings.matches, output)
    if config.verify:
        show_rerun(findings.checks, findings.not_run, output)
    if config.plot:
        plot_cache(reader, config.plot)
        output.say(f"Wrote {config.plot}.")
    output.json(
        {
            **summary.to_json(),
            "verified": config.verify,
            **findings.to_json(config),
            "plot": str(config.plot) if config.plot else None,
        }
    )
    _require_agreement(findings, config.path)
    teacher = summary.teacher
    if teacher.weights_digest:
        demo = is_of_demo(teacher.policy_type)
        output.next(train_on(config.path, demo=demo, policy=teacher.source))


def _open(path: Location, output: Output) -> "CacheReader":
    """Open the cache; for an unfinished one, add to the error how far the build got."""
    from craftcli.cache.reading.reader import CacheReader
    from craftcli.cache.storage.base import UnreachableStoreError
    from craftcli.cache.storage.by_location import open_destination

    try:
        return CacheReader.open(path)
    except UnreachableStoreError:
        raise
    except CraftError as error:
        exists = isinstance(path, Path) and path.exists()
        unfinished = None if exists else open_destination(path).interrupted_build()
        if unfinished is None:
            raise
        done, chunks = unfinished.committed, unfinished.chunks
        output.json(
            {"path": str(path), "complete": False, "chunks": chunks, "committed_chunks": done}
        )
        why = f"{error.why} {done} of {chunks} chunks are committed."
        raise CraftError(error.what, why=why, fix=error.fix, exit_code=error.exit_code) from error


def _compare(reader: "CacheReader", config: InspectConfig, output: Output) -> _Findings:
    """Compare the cache with the policy and dataset, and run its teacher again for --verify."""
    from craftcli.cache.identity import unnamed_teacher_reason

    not_run = None
    if not config.rows_to_run:
        not_run = "--verify-rows is 0"
    elif not config.policy and not is_of_demo(reader.manifest.teacher.policy_type):
        not_run = unnamed_teacher_reason(reader.manifest)
    # Return before LeRobot is imported, which takes long, if there is nothing to compare or run.
    if not_run and not config.policy and not config.dataset:
        return _Findings(not_run=not_run)
    what = "dataset" if not_run and not config.policy else "policy"
    with output.status(f"Loading the {what} ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.evaluation.cache_check import CacheCheck

        check = CacheCheck(reader, config)
    matches = tuple(check.matches)
    if not_run:
        return _Findings(matches=matches, not_run=not_run)
    with output.status("Running the teacher again ..."):
        rerun = check.rerun(config.rows_to_run)
    return _Findings(
        matches=matches, checks=rerun.checks, not_run=rerun.not_run, changed=rerun.changed
    )


def _require_sound(problems: list[str], path: Location) -> None:
    if problems:
        raise CraftError(
            f"The cache {path} is damaged.",
            why="; ".join(problems) + ".",
            fix="rebuild it with craft cache build --overwrite.",
            exit_code=EXIT_CHECK_FAILED,
        )


def _require_agreement(findings: _Findings, path: Location) -> None:
    """Raise an error that names the fields that differ, or the rows that are off."""
    differing = [match for match in findings.matches if not match.matches]
    off = [check for check in findings.checks if not check.passed]
    if differing:
        raise CraftError(
            f"The cache {path} was built from another policy or dataset.",
            why="; ".join(describe_match(match) for match in differing) + ".",
            fix="give the teacher and the dataset of the cache, or rebuild it with "
            "craft cache build.",
            exit_code=EXIT_CHECK_FAILED,
        )
    if findings.changed:
        raise CraftError(
            f"The cache {path} could not be checked against its teacher.",
            why=f"{findings.not_run}.",
            fix="give the teacher and the dataset that it was built with, or rebuild it with "
            "craft cache build --overwrite.",
            exit_code=EXIT_CHECK_FAILED,
        )
    if off:
        raise CraftError(
            f"The teacher no longer reproduces the states that {path} holds.",
            why=f"{len(off)} of {len(findings.checks)} rows are off: "
            + "; ".join(describe_row(check) for check in off)
            + f"; rounding explains at most {off[0].tolerance:.0e}.",
            fix="do not train on it; rebuild it with craft cache build --overwrite.",
            exit_code=EXIT_CHECK_FAILED,
        )
