"""The course of `craft cache inspect`: open, check, show, compare, draw."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from craftcli.cli.inspect_tables import (
    describe_match,
    describe_row,
    show_matches,
    show_rerun,
    show_summary,
)
from craftcli.cli.output import Output
from craftcli.cli.quiet import quiet_libraries
from craftcli.config import DEMO
from craftcli.errors import EXIT_CHECK_FAILED, EXIT_USAGE, CraftError
from craftcli.locations import Location
from craftcli.renames import parse_renames
from craftcli.settings import option_name

if TYPE_CHECKING:
    from craftcli.cache.matching import FieldMatch
    from craftcli.cache.reader import CacheReader
    from craftcli.cache.recheck import RowCheck

VERIFY_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked for; None is what was not."""

    path: Location
    verify: bool
    verify_rows: int | None
    plot: Path | None
    policy: str | None
    revision: str | None
    dataset: str | None
    dataset_root: str | None
    dataset_revision: str | None
    rename: str | None
    trust_remote_code: bool
    device: str | None

    def __post_init__(self) -> None:
        own_policy, own_dataset = (x not in (None, DEMO) for x in (self.policy, self.dataset))
        needs = (
            ("verify_rows", self.verify, "--verify"),
            ("revision", own_policy, "--policy with the name of one on the Hub"),
            ("dataset_root", own_dataset, "--dataset with a name other than demo"),
            ("dataset_revision", own_dataset, "--dataset with the name of one on the Hub"),
            ("rename", self.policy or self.verify, "--policy or --verify"),
            ("device", self.policy or self.verify, "--policy or --verify"),
        )
        problems = [
            f"{option_name(name)} needs {what}."
            for name, met, what in needs
            if getattr(self, name) is not None and not met
        ]
        try:
            _ = self.renames
        except ValueError as error:
            problems.append(f"--rename {error}.")
        if problems:
            raise CraftError(
                "These options do not go together.",
                why=" ".join(problems),
                fix="add what is missing, or leave them out.",
                exit_code=EXIT_USAGE,
            )

    @property
    def renames(self) -> dict[str, str]:
        """The policy's name for each name of the dataset that differs."""
        return {} if self.rename is None else parse_renames(self.rename)

    @property
    def rows(self) -> int:
        """Over how many rows the teacher is to be run again."""
        if not self.verify:
            return 0
        return VERIFY_ROWS if self.verify_rows is None else self.verify_rows


@dataclass(frozen=True, kw_only=True)
class _Findings:
    """What holding a cache against its policy and dataset has shown."""

    matches: "tuple[FieldMatch, ...]" = ()
    checks: "tuple[RowCheck, ...]" = ()
    not_run: str | None = None

    def to_json(self, asked: Asked) -> dict[str, Any]:
        """As plain JSON values, null for what was not asked for."""
        compared = asked.policy or asked.dataset
        rerun = {"not_run": self.not_run, "rows": [check.to_json() for check in self.checks]}
        return {
            "identity": [match.to_json() for match in self.matches] if compared else None,
            "rerun": rerun if asked.verify else None,
        }


def run(asked: Asked, output: Output) -> None:
    """Show a cache, and whatever else was asked for; what is wrong with it is an error."""
    from craftcli.cache.summary import summarize

    if asked.plot:
        # Before anything that takes long.
        from craftcli.report.cache_plot import check_plot_file, plot_cache

        check_plot_file(asked.plot)
    reader = _open(asked.path, output)
    if asked.verify:
        _require_sound(reader.verify(), asked.path)
    summary = summarize(reader)
    show_summary(summary, output)
    if asked.verify:
        output.say(f"Verified: all {summary.chunks} chunks match their checksums.")
    findings = _compare(reader, asked, output)
    show_matches(findings.matches, output)
    if asked.verify:
        show_rerun(findings.checks, findings.not_run, output)
    if asked.plot:
        plot_cache(reader, asked.plot)
        output.say(f"Wrote {asked.plot}.")
    output.json(
        {
            **summary.to_json(),
            "verified": asked.verify,
            **findings.to_json(asked),
            "plot": str(asked.plot) if asked.plot else None,
        }
    )
    _require_agreement(findings, asked.path)


def _open(path: Location, output: Output) -> "CacheReader":
    """Open the cache; of one that is half-built, say how far it got."""
    from craftcli.cache.reader import CacheReader
    from craftcli.cache.remote import StoreGoneError
    from craftcli.cache.sites import open_site

    try:
        return CacheReader.open(path)
    except StoreGoneError:
        raise
    except CraftError as error:
        there = isinstance(path, Path) and path.exists()
        unfinished = None if there else open_site(path).unfinished()
        if unfinished is None:
            raise
        done, chunks = unfinished.committed, unfinished.chunks
        output.json(
            {"path": str(path), "complete": False, "chunks": chunks, "committed_chunks": done}
        )
        why = f"{error.why} {done} of {chunks} chunks are committed."
        raise CraftError(error.what, why=why, fix=error.fix, exit_code=error.exit_code) from error


def _compare(reader: "CacheReader", asked: Asked, output: Output) -> _Findings:
    """Hold the cache against what was given, and run its teacher again if that was asked for."""
    from craftcli.cache.matching import not_at_hand, teacher_at_hand

    not_run = None
    if not asked.rows:
        not_run = "--verify-rows is 0"
    elif not asked.policy and teacher_at_hand(reader.manifest) is None:
        not_run = not_at_hand(reader.manifest)
    # LeRobot takes long to import, and is not needed to say that there is nothing to run.
    if not_run and not asked.policy and not asked.dataset:
        return _Findings(not_run=not_run)
    what = "dataset" if not_run and not asked.policy else "policy"
    with output.status(f"Loading the {what} ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.engine.inspection import Given, Inspection

        given = Given(
            policy=asked.policy,
            revision=asked.revision,
            dataset=asked.dataset,
            dataset_root=asked.dataset_root,
            dataset_revision=asked.dataset_revision,
            renames=asked.renames,
            trust_remote_code=asked.trust_remote_code,
            device=asked.device or "auto",
        )
        inspection = Inspection(reader, given)
    matches = tuple(inspection.matches)
    if not_run:
        return _Findings(matches=matches, not_run=not_run)
    with output.status("Running the teacher again ..."):
        rerun = inspection.rerun(asked.rows)
    return _Findings(matches=matches, checks=rerun.checks, not_run=rerun.not_run)


def _require_sound(problems: list[str], path: Location) -> None:
    if problems:
        raise CraftError(
            f"The cache {path} is damaged.",
            why="; ".join(problems) + ".",
            fix="rebuild it with craft cache build --overwrite.",
            exit_code=EXIT_CHECK_FAILED,
        )


def _require_agreement(findings: _Findings, path: Location) -> None:
    """Stop with the fields that differ, or with the rows that are off."""
    differing = [match for match in findings.matches if not match.matches]
    off = [check for check in findings.checks if not check.passed]
    if differing:
        raise CraftError(
            f"The cache {path} was not built from what was given.",
            why="; ".join(describe_match(match) for match in differing) + ".",
            fix="give the teacher and the dataset of the cache, or rebuild it with "
            "craft cache build.",
            exit_code=EXIT_CHECK_FAILED,
        )
    if off:
        raise CraftError(
            f"The teacher does not give the states that {path} holds.",
            why=f"{len(off)} of {len(findings.checks)} rows are off: "
            + "; ".join(describe_row(check) for check in off)
            + f"; at most {off[0].tolerance:.0e} is rounding.",
            fix="rebuild it with craft cache build --overwrite, and do not train on it as it is.",
            exit_code=EXIT_CHECK_FAILED,
        )
