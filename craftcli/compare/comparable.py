"""Keeps the measurements that can be compared, and notes which are left out and why.

Runs can be compared if they started from the same teacher, were trained on the same dataset, and
were measured on the same episodes and anchors. The majority of the runs decides which.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from craftcli.compare.runs import Quantity, RunRecord
from craftcli.evaluation.results import Success


@dataclass(frozen=True, kw_only=True)
class Comparable:
    """Runs with their comparable measurements only, and notes on the others."""

    records: tuple[RunRecord, ...]
    notes: tuple[str, ...]


def keep_comparable(records: Sequence[RunRecord]) -> Comparable:
    """Drop the measurements that cannot be compared with those of the majority."""
    notes = _missing(records)
    kept = list(records)
    for find, what in (
        (_teacher, "started from another teacher"),
        (_data, "was trained on another dataset"),
    ):
        kept = _same_origin(kept, find, what, notes)
    kept = _same_rollouts(kept, notes)
    for name in ("drift", "action_error"):
        kept = _same_basis(kept, name, notes)
    return Comparable(records=tuple(kept), notes=tuple(notes))


def _missing(records: Sequence[RunRecord]) -> list[str]:
    """Steps that are missing, each with the command that does it."""
    notes = []
    for record in records:
        if not record.saved:
            notes.append(f"{record.folder} has no checkpoint: it stopped before it saved one.")
        elif record.summary and not record.summary.complete:
            notes.append(
                f"{record.folder} stopped at step {record.summary.steps_done} of "
                f"{record.summary.steps}: craft train --resume {record.folder}"
            )
        if record.saved and record.measured is None:
            notes.append(f"{record.folder} was not evaluated: craft eval {record.folder}")
    return notes


def _teacher(record: RunRecord) -> Hashable | None:
    return record.summary and record.summary.teacher


def _data(record: RunRecord) -> Hashable | None:
    return record.summary and record.summary.dataset_fingerprint


def _same_origin(
    records: list[RunRecord],
    find: Callable[[RunRecord], Hashable | None],
    what: str,
    notes: list[str],
) -> list[RunRecord]:
    usual = _most_common(find(record) for record in records)
    kept = []
    for record in records:
        own = find(record)
        if own is not None and own != usual:
            notes.append(
                f"{record.folder} {what} than most: only time, memory and size are compared."
            )
            record = replace(record, measured=None)
        kept.append(record)
    return kept


def _same_rollouts(records: list[RunRecord], notes: list[str]) -> list[RunRecord]:
    """Keep success on the episodes in which most policies were rolled out."""
    episodes: dict[str, list[Hashable]] = {}
    for record in records:
        for name, success in _successes(record).items():
            episodes.setdefault(name, []).append(_episodes(success))
    usual = {name: _most_common(found) for name, found in episodes.items()}
    kept = []
    for record in records:
        own = _successes(record)
        same = {name: s for name, s in own.items() if _episodes(s) == usual[name]}
        if other := [name for name in own if name not in same]:
            notes.append(
                f"{record.folder} was rolled out on other episodes than most in "
                f"{', '.join(other)}: left out; repeat craft eval with the same --episodes, --seed "
                "and steps."
            )
        if record.measured:
            if own and (absent := [name for name in usual if name not in own]):
                notes.append(
                    f"{record.folder} was not rolled out in {', '.join(absent)}: craft eval "
                    f"{record.folder} --env {' --env '.join(absent)}"
                )
            before = record.measured.of_teacher
            before = {name: s for name, s in before.items() if _episodes(s) == usual.get(name)}
            measured = replace(record.measured, successes=same, of_teacher=before)
            record = replace(record, measured=measured)
        kept.append(record)
    return kept


def _same_basis(records: list[RunRecord], name: str, notes: list[str]) -> list[RunRecord]:
    """Keep the numbers that were measured on the same anchors."""

    def own(record: RunRecord) -> Quantity | None:
        found: Quantity | None = getattr(record.measured, name) if record.measured else None
        return found

    found = [own(record) for record in records]
    usual = _most_common(quantity and quantity.basis for quantity in found)
    kept = []
    for record, quantity in zip(records, found, strict=True):
        if quantity and record.measured and quantity.basis != usual:
            shown = name.replace("_", " ")
            notes.append(
                f"{record.folder}: the {shown} was measured on other anchors than most: left out; "
                "repeat craft eval with the same --cache."
            )
            nothing: dict[str, Any] = {name: None}
            record = replace(record, measured=replace(record.measured, **nothing))
        kept.append(record)
    return kept


def _successes(record: RunRecord) -> dict[str, Success]:
    return dict(record.measured.successes) if record.measured else {}


def _episodes(success: Success) -> Hashable:
    return success.max_steps, tuple(episode.seed for episode in success.episodes)


def _most_common(values: Iterable[Hashable | None]) -> Hashable | None:
    """The most frequent known value; the first of them if several are as frequent."""
    counted = Counter(value for value in values if value is not None)
    return counted.most_common(1)[0][0] if counted else None
