"""Runs side by side: the figures of every arm, over its seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from craftcli.report.comparable import comparable
from craftcli.report.compare_arms import Arm, group_arms
from craftcli.report.compare_runs import NEW, OLD, Roles, RunRecord, read_roles, read_sources
from craftcli.report.figures import Figure, Rate, over_seeds, success_over_seeds


@dataclass(frozen=True, kw_only=True)
class ArmFigures:
    """What is known of one arm, None where nobody measured it."""

    arm: Arm
    figures: Mapping[str, Figure | None]
    by_environment: Mapping[str, Figure]
    """Success in every environment it was rolled out in."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "number": self.arm.number,
            "arm": self.arm.label,
            "seeds": [run.seed for run in self.arm.runs],
            "runs": [str(run.folder) for run in self.arm.runs],
            **{name: figure and figure.to_json() for name, figure in self.figures.items()},
            "by_environment": {n: figure.to_json() for n, figure in self.by_environment.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The arms, the teacher they began with, and what could not be compared."""

    arms: tuple[ArmFigures, ...]
    teacher: ArmFigures | None
    environments: Mapping[str, str | None]
    """The role of every environment: old, new, or None if it has none."""
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[ArmFigures, ...]:
        """The teacher, if it is there, and the arms."""
        return ((self.teacher,) if self.teacher else ()) + self.arms

    @property
    def plain(self) -> ArmFigures | None:
        """Plain fine-tuning, which shows what the new task allows."""
        plain = (arm for arm in self.arms if arm.arm.runs[0].settings.get("mode") == "none")
        return next(plain, None)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "teacher": self.teacher and self.teacher.to_json(),
            "arms": [arm.to_json() for arm in self.arms],
            "environments": dict(self.environments),
            "notes": list(self.notes),
        }


def compare_runs(sources: Sequence[Path], roles: Roles | None = None) -> Comparison:
    """Compare the runs in these folders, with one folder of the teacher's evaluations or none."""
    return compare_records(read_sources(sources), roles or read_roles(sources))


def find_teacher(records: Sequence[RunRecord]) -> RunRecord | None:
    """Which of them is the policy that the runs began with."""
    origins = {record.summary.teacher for record in records if record.summary}
    policies = (record for record in records if record.kind == "policy" and record.measured)
    return next((p for p in policies if not origins or _digest(p) in origins), None)


def _digest(record: RunRecord) -> str | None:
    return record.measured.policy if record.measured else None


def compare_records(records: Sequence[RunRecord], roles: Roles) -> Comparison:
    """Compare what is known of these runs."""
    checked = comparable(records)
    environments = {
        name: roles.of(name, success.group)
        for record in checked.records
        if record.measured
        for name, success in record.measured.successes.items()
    }
    before = find_teacher(checked.records)
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
            f"Whether {', '.join(unknown)} shows the old or the new skill is not known: say it "
            "with --old and --new."
        )
    return Comparison(
        arms=tuple(_figures(arm, environments, before) for arm in arms),
        teacher=_figures(Arm(number=0, hue=0, label="teacher", runs=(before,)), environments, None)
        if before
        else None,
        environments=environments,
        notes=tuple(notes),
    )


def _figures(
    arm: Arm, environments: Mapping[str, str | None], teacher: RunRecord | None
) -> ArmFigures:
    def mean(value: Callable[[RunRecord], float | None]) -> Figure | None:
        known = [found for run in arm.runs if (found := value(run)) is not None]
        return over_seeds(known) if known else None

    figures: dict[str, Figure | None] = {}
    for role in (OLD, NEW):
        wanted = [name for name, own in environments.items() if own == role]
        figures[role] = _success(arm, wanted)
    each = {name: found for name in environments if (found := _success(arm, [name]))}
    nbt = mean(lambda run: _forgetting(run, teacher, environments)) if teacher else None
    figures["nbt"] = nbt
    figures["drift"] = mean(lambda run: _quantity(run, "drift"))
    figures["action_error"] = mean(lambda run: _quantity(run, "action_error"))
    for name in ("seconds", "peak_memory_bytes", "anchors", "trainable_parameters"):
        figures[name] = mean(partial(_cost, name))
    return ArmFigures(arm=arm, figures=figures, by_environment=each)


def _success(arm: Arm, wanted: Sequence[str]) -> Figure | None:
    rates = [rate for run in arm.runs if (rate := _rate(run, wanted))]
    return success_over_seeds(rates) if rates else None


def _rate(run: RunRecord, wanted: Sequence[str]) -> Rate | None:
    """Success over several environments; None unless it was rolled out in every one."""
    found = run.measured.successes if run.measured else {}
    if not wanted or any(name not in found for name in wanted):
        return None
    return Rate(
        count=sum(found[name].count for name in wanted),
        trials=sum(len(found[name].episodes) for name in wanted),
    )


def _forgetting(
    run: RunRecord, teacher: RunRecord, environments: Mapping[str, str | None]
) -> float | None:
    """NBT: the teacher's success less the run's, mean over the old tasks; BWT is its negative."""
    if not (run.measured and teacher.measured):
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
