"""The tables and lines of `craft cache inspect`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from craftcli.cli.output import Output, size

if TYPE_CHECKING:
    from craftcli.cache.identity import FieldMatch
    from craftcli.cache.made_rows import MadeRowsSummary
    from craftcli.cache.summary import CacheSummary
    from craftcli.evaluation.cache_check import RowCheck

_DIGEST_LENGTH = 64


def show_summary(summary: "CacheSummary", output: Output) -> None:
    """Show what the cache holds and where it came from."""
    teacher, dataset = summary.teacher, summary.dataset
    layers = {}
    if "hidden" in summary.kinds:
        layers = {
            "Layers": f"{', '.join(map(str, summary.layers))} of {summary.layer_count} "
            f"in stack {summary.stack}",
            "Pooling": f"{summary.pooling}: {summary.vectors} vectors of {summary.dim} a layer"
            + _filled(summary),
        }
    sealed = _sealed({"statistics": summary.stats_sealed, "frames": summary.frames_sealed})
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
            **({"Sealed": sealed} if sealed else {}),
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
    if summary.made:
        _show_made_rows(summary.made, output)
    if summary.datasets:
        output.table(
            "Rows by dataset", {name: str(rows) for name, rows in summary.datasets.items()}
        )
    output.table("Rows by task", {task: str(rows) for task, rows in summary.tasks.items()})


def _sealed(parts: dict[str, bool | None]) -> str:
    """Which parts digests cover beside the rows, such as `statistics; not frames, ...`."""
    yes = [name for name, sealed in parts.items() if sealed]
    no = [name for name, sealed in parts.items() if sealed is False]
    older = f"not {' and '.join(no)}: a craft that wrote no digests of them built the cache"
    return "; ".join([" and ".join(yes)] * bool(yes) + [older] * bool(no))


def _filled(summary: "CacheSummary") -> str:
    """How many of the vectors of a row are there, where many are not."""
    filled = summary.layer_norms[0].count / max(1, summary.valid_rows)
    return f", {filled:.1f} of them filled" if filled < summary.vectors else ""


def _show_made_rows(made: "MadeRowsSummary", output: Output) -> None:
    """Show how many rows are real and how many are made, and how far they lie from each other."""
    lines = {
        "Real": f"{made.real_rows} rows, frames as they are",
        "Made": f"{made.rows} rows ({made.valid_rows} valid): {made.source}",
    }
    for distance in made.distances:
        among = "" if distance.real is None else f"; real rows from each other {distance.real:.3g}"
        lines[f"Distance in {distance.of}"] = (
            f"made rows from the nearest real one {distance.made:.3g}{among} (median)"
        )
    if not made.distances:
        lines["Distance"] = "no real rows to compare with"
    output.table("Real and made rows", lines)


def show_matches(matches: "Sequence[FieldMatch]", output: Output) -> None:
    """Show all fields that were compared, and whether they match."""
    if matches:
        output.table(
            "Compared with the policy and dataset given",
            {
                match.field: f"matches: {_short(match.cached)}"
                if match.matches
                else f"DIFFERS: {_short(match.cached)} in the cache, {_short(match.given)} given"
                for match in matches
            },
        )


def show_rerun(checks: "Sequence[RowCheck]", not_run: str | None, output: Output) -> None:
    """Show the rows over which the teacher was run again, or why it was not run."""
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
    """A field that differs, as a part of an error."""
    return (
        f"{match.field} is {_short(match.cached)} in the cache and {_short(match.given)} in the "
        "one given"
    )


def describe_row(check: "RowCheck") -> str:
    """A row that is off, as a part of an error."""
    return (
        f"row {check.row} (dataset index {check.dataset_index}) by {check.drift:.2g} of the "
        f"variance in {check.layer}"
    )


def _short(value: str) -> str:
    return value[:12] if len(value) == _DIGEST_LENGTH else value
