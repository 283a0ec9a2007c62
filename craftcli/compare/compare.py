"""Compares runs: the results of the teacher and of every arm over its seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from craftcli.compare.arms import Arm, group_arms
from craftcli.compare.comparable import keep_comparable
from craftcli.compare.estimates import Estimate, Rate, over_seeds, success_over_seeds
from craftcli.compare.runs import NEW, OLD, Measured, Roles, RunRecord, read_sources
from craftcli.errors import CraftError
from craftcli.evaluation.results import Success


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """The results of one arm."""

    arm: Arm
    estimates: Mapping[str, Estimate | None]
    """By the key of a column; None if it was not measured."""
    by_environment: Mapping[str, Estimate]
    """Success in each environment in which it was rolled out."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "number": self.arm.number,
            "arm": self.arm.label,
            "seeds": [run.seed for run in self.arm.runs],
            "runs": [str(run.folder) for run in self.arm.runs],
            **{name: found and found.to_json() for name, found in self.estimates.items()},
            "by_environment": {
                name: found.to_json() for name, found in self.by_environment.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The arms, the teacher from which they started, and what could not be compared."""

    arms: tuple[ArmResult, ...]
    teacher: ArmResult | None
    environments: Mapping[str, str | None]
    """The role of each environment: `old`, `new`, or None if unknown."""
    notes: tuple[str, ...]
    """What is missing or could not be compared, each with what to do about it."""
    damage: tuple[CraftError, ...] = ()
    """What could not be read; the runs that it belongs to are left out."""

    @property
    def rows(self) -> tuple[ArmResult, ...]:
        """The teacher, if it was evaluated, then the arms."""
        return ((self.teacher,) if self.teacher else ()) + self.arms

    @property
    def plain(self) -> ArmResult | None:
        """Plain fine-tuning; its success on the new task is the goal of the other arms."""
        plain = (arm for arm in self.arms if arm.arm.runs[0].settings.get("mode") == "none")
        return next(plain, None)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "teacher": self.teacher and self.teacher.to_json(),
            "arms": [arm.to_json() for arm in self.arms],
            "environments": dict(self.environments),
            "notes": list(self.notes),
            "damage": [f"{error.what} {error.why}" for error in self.damage],
        }


def compare_runs(sources: Sequence[Path], roles: Roles | None = None) -> Comparison:
    """Compare runs, given their folders, folders of sweeps, or evaluation files.

    Without `roles`, the sweeps among the folders give the roles of their environments.
    """
    found = read_sources(sources)
    comparison = compare_records(found.records, roles or found.roles)
    return replace(comparison, notes=found.notes + comparison.notes, damage=found.damage)


def compare_records(records: Sequence[RunRecord], roles: Roles) -> Comparison:
    """Compare runs that were read already."""
    checked = keep_comparable(records)
    environments = {
        name: roles.of(name, success.group)
        for record in checked.records
        if record.measured
        for name, success in record.measured.successes.items()
    }
    before = find_teacher(checked.records) or _measured_with_runs(checked.records)
    teacher = None
    if before:
        arm = Arm(number=0, hue=0, label="teacher", runs=(before,))
        teacher = _results(arm, environments, None)
    arms = group_arms([record for record in checked.records if record is not before])
    notes = list(checked.notes)
    if arms and before is None:
        notes.append(
            "NBT needs the teacher's own success: craft eval TEACHER --output teacher.json, and "
            "add teacher.json here."
        )
    unknown = [name for name, role in environments.items() if role is None]
    if unknown:
        notes.append(
            f"Whether {', '.join(unknown)} shows the old or the new skill is unknown: name it "
            "with --old or --new."
        )
    return Comparison(
        arms=tuple(_results(arm, environments, before) for arm in arms),
        teacher=teacher,
        environments=environments,
        notes=tuple(notes),
    )


def find_teacher(records: Sequence[RunRecord]) -> RunRecord | None:
    """The record of the policy from which the runs started, if there is one."""
    teachers = {record.summary.teacher for record in records if record.summary}
    policies = (record for record in records if record.kind == "policy" and record.measured)
    return next((p for p in policies if not teachers or _digest(p) in teachers), None)


def _measured_with_runs(records: Sequence[RunRecord]) -> RunRecord | None:
    """The teacher, as `craft eval RUN` has measured it beside the run; None if it has not."""
    found: dict[str, Success] = {}
    source = ""
    for record in records:
        if record.measured and record.measured.of_teacher:
            found = {**record.measured.of_teacher, **found}
            source = source or str(record.settings.get("policy", "teacher"))
    if not found:
        return None
    measured = Measured(policy="", successes=found, drift=None, action_error=None)
    return RunRecord(
        folder=Path(source),
        kind="policy",
        settings={},
        summary=None,
        metrics=(),
        measured=measured,
        saved=True,
    )


def _digest(record: RunRecord) -> str | None:
    return record.measured.policy if record.measured else None


def _results(
    arm: Arm, environments: Mapping[str, str | None], teacher: RunRecord | None
) -> ArmResult:
    def mean(value: Callable[[RunRecord], float | None]) -> Estimate | None:
        known = [found for run in arm.runs if (found := value(run)) is not None]
        return over_seeds(known) if known else None

    estimates: dict[str, Estimate | None] = {}
    for role in (OLD, NEW):
        estimates[role] = _success(arm, [n for n, own in environments.items() if own == role])
    estimates["nbt"] = mean(lambda run: _forgetting(run, teacher, environments))
    estimates["drift"] = mean(lambda run: _quantity(run, "drift"))
    estimates["action_error"] = mean(lambda run: _quantity(run, "action_error"))
    for name in ("seconds", "peak_memory_bytes", "anchors", "trainable_parameters"):
        estimates[name] = mean(partial(_cost, name))
    each = {name: found for name in environments if (found := _success(arm, [name]))}
    return ArmResult(arm=arm, estimates=estimates, by_environment=each)


def _success(arm: Arm, environments: Sequence[str]) -> Estimate | None:
    rates = [rate for run in arm.runs if (rate := _rate(run, environments))]
    return success_over_seeds(rates) if rates else None


def _rate(run: RunRecord, environments: Sequence[str]) -> Rate | None:
    """Success over these environments; None unless it was measured in all of them."""
    found = run.measured.successes if run.measured else {}
    if not environments or any(name not in found for name in environments):
        return None
    return Rate(
        count=sum(found[name].count for name in environments),
        trials=sum(len(found[name].episodes) for name in environments),
    )


def _forgetting(
    run: RunRecord, teacher: RunRecord | None, environments: Mapping[str, str | None]
) -> float | None:
    """NBT: the teacher's success minus the run's, mean over the old tasks; BWT is its negative."""
    if not (teacher and run.measured and teacher.measured):
        return None
    before, after = teacher.measured.successes, run.measured.successes
    old = [name for name, role in environments.items() if role == OLD]
    if not old or any(name not in before or name not in after for name in old):
        return None
    return fmean(before[name].rate - after[name].rate for name in old)


def _cost(name: str, run: RunRecord) -> float | None:
    found: float | None = getattr(run.summary, name) if run.summary else None
    return found


def _quantity(run: RunRecord, name: str) -> float | None:
    quantity = getattr(run.measured, name) if run.measured else None
    return None if quantity is None else float(quantity.value)
