"""What `craft cache inspect` found, as tables and lines."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from craftcli.cli.output import Output, size

if TYPE_CHECKING:
    from craftcli.cache.matching import FieldMatch
    from craftcli.cache.recheck import RowCheck
    from craftcli.cache.summary import CacheSummary

_DIGEST = 64


def show_summary(summary: "CacheSummary", output: Output) -> None:
    """What is in the cache and where it came from."""
    teacher, dataset = summary.teacher, summary.dataset
    layers = {}
    if "hidden" in summary.kinds:
        layers = {
            "Layers": f"{', '.join(map(str, summary.layers))} of {summary.layer_count} "
            f"in stack {summary.stack}",
            "Pooling": f"{summary.pooling}: {summary.vectors} vectors of {summary.dim} a layer",
        }
    output.table(
        f"Cache {summary.path}",
        {
            "Rows": f"{summary.rows} ({summary.valid_rows} valid) in {summary.chunks} chunks",
            "Complete": "yes" if summary.complete else "no",
            "Holds": ", ".join(summary.kinds),
            **layers,
            "Stored as": f"{summary.dtype}, images {summary.images}",
            "Size": f"{size(summary.size_bytes)}, {size(round(summary.bytes_per_row))} a row",
            "Teacher": f"{teacher.source} ({teacher.policy_type}, {teacher.dtype}), "
            f"weights {teacher.weights_digest[:12]}",
            "Dataset": f"{dataset.repo_id}: {dataset.episodes} episodes, {dataset.frames} frames, "
            f"fingerprint {dataset.fingerprint[:12]}",
            "Selection": f"{summary.sampling}, seed {summary.seed}, "
            f"{summary.episodes} episodes sampled",
            "Built": f"{summary.created} with "
            + ", ".join(f"{name} {version}" for name, version in summary.versions.items()),
        },
    )
    if summary.layer_norms:
        output.table(
            "Norm of the hidden states",
            {
                norms.layer: f"mean {norms.mean:.3f}, std {norms.std:.3f}, "
                f"range {norms.min:.3f} to {norms.max:.3f}, variance {norms.scalar_variance:.4g}"
                for norms in summary.layer_norms
            },
        )
    output.table("Rows by task", {task: str(rows) for task, rows in summary.tasks.items()})


def show_matches(matches: "Sequence[FieldMatch]", output: Output) -> None:
    """The fields that were compared, those that match too."""
    if matches:
        output.table(
            "Compared with what was given",
            {
                match.field: f"matches: {_short(match.cached)}"
                if match.matches
                else f"DIFFERS: {_short(match.cached)} in the cache, {_short(match.given)} given"
                for match in matches
            },
        )


def show_rerun(checks: "Sequence[RowCheck]", not_run: str | None, output: Output) -> None:
    """How the rows fared that the teacher was run over again, or why it was not."""
    if not checks:
        output.say(f"Not re-run: {not_run}.")
        return
    failed = [check for check in checks if not check.passed]
    output.table(
        f"Teacher re-run over {len(checks)} rows: {len(failed)} off",
        {
            f"row {check.row}": f"{'ok' if check.passed else 'OFF'}: drift {check.drift:.1e} in "
            f"{check.layer}; dataset index {check.dataset_index}, episode {check.episode}, "
            f"frame {check.frame}"
            for check in checks
        },
    )


def describe_match(match: "FieldMatch") -> str:
    """A field that differs, in an error."""
    return (
        f"{match.field} is {_short(match.cached)} in the cache and {_short(match.given)} in what "
        "was given"
    )


def describe_row(check: "RowCheck") -> str:
    """A row that is off, in an error."""
    return (
        f"row {check.row} (dataset index {check.dataset_index}) by {check.drift:.2g} of the "
        f"variance in {check.layer}"
    )


def _short(value: str) -> str:
    return value[:12] if len(value) == _DIGEST else value
