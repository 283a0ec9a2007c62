"""A LeRobot checkpoint made of two: found, put together, and written whole or not at all."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from craftcli.config import DEMO
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.engine.saving import CONFIG_FILE
from craftcli.engine.weight_merging import (
    Group,
    choose_alphas,
    merge_weights,
    require_same_architecture,
)
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.adapters import merge_adapters, weight_dtypes
from craftcli.policies.identity import processor_digest
from craftcli.policies.loading import Checkpoint, load_checkpoint
from craftcli.run_files import MERGE_FILE as MERGE_FILE


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """What was written."""

    output: str
    student: str
    teacher: str | None
    """None when all weights are the student's."""
    alpha: float
    groups: dict[str, float]
    tensors_by_alpha: dict[str, int]
    parameters: int
    adapters_merged: bool
    other_processor: bool
    """Whether the teacher's processor differs; the student's was written."""

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class MergePlan:
    """Two policies and how far each tensor goes from one to the other."""

    student: Checkpoint
    teacher: Checkpoint | None
    alpha: float
    groups: tuple[Group, ...]
    alphas: dict[str, float]
    dtypes: dict[str, torch.dtype]
    adapters_merged: bool

    @property
    def weights(self) -> dict[str, Tensor]:
        """The student's weights, without adapters."""
        state: dict[str, Tensor] = self.student.policy.state_dict()
        return state


def plan_merge(
    source: str,
    *,
    teacher: str | None,
    alpha: float,
    groups: Sequence[Group],
    trust_remote_code: bool = False,
) -> MergePlan:
    """Open what is needed, and find every problem before anything is written."""
    opened = load_checkpoint(source, device="cpu", trust_remote_code=trust_remote_code)
    needs_teacher = alpha != 1 or any(group.alpha != 1 for group in groups)
    other = None
    if needs_teacher or teacher:
        other = _open_teacher(opened, teacher, trust_remote_code=trust_remote_code)
    dtypes = weight_dtypes(opened.policy)
    student = merge_adapters(opened)
    state = student.policy.state_dict()
    alphas = choose_alphas(state, alpha, groups)
    if other is not None:
        require_same_architecture(other.policy.state_dict(), state)
    return MergePlan(
        student=student,
        teacher=other,
        alpha=alpha,
        groups=tuple(groups),
        alphas=alphas,
        dtypes=dtypes,
        adapters_merged=opened.peft is not None,
    )


def write_merge(
    plan: MergePlan, output: Path, *, overwrite: bool, on_tensor: Callable[[int], None]
) -> MergeReport:
    """Write the policy in between, with the student's settings and processors."""
    check_folder(output, overwrite=overwrite)
    student, own = plan.student, plan.weights
    others = own if plan.teacher is None else plan.teacher.policy.state_dict()
    merged = merge_weights(others, own, plan.alphas, plan.dtypes, on_tensor)
    report = _report(plan, output)
    partial = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        # It says where weights come from, and these come from here.
        student.policy.config.pretrained_path = None
        student.policy.save_pretrained(partial, state_dict=merged)
        student.preprocess.save_pretrained(partial)
        student.postprocess.save_pretrained(partial)
        (partial / MERGE_FILE).write_text(json.dumps(report.to_json(), indent=2), encoding="utf-8")
        _put_in_place(partial, output)
    except OSError as error:
        raise CraftError(
            f"Cannot write to {output}.",
            why=f"{error.strerror or error}.",
            fix="choose another folder with --output.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def check_folder(output: Path, *, overwrite: bool) -> None:
    """Refuse a folder that holds something, before any work is done."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MERGE_FILE).is_file():
        raise CraftError(
            f"{output} is in the way.",
            why="it exists and was not made by craft merge, so it is never replaced.",
            fix="choose another folder with --output.",
        )
    if not overwrite:
        raise CraftError(
            f"{output} already exists.",
            why="policies are not replaced unasked.",
            fix="choose another folder with --output, or add --overwrite.",
        )


def _open_teacher(student: Checkpoint, given: str | None, *, trust_remote_code: bool) -> Checkpoint:
    """The teacher given, or the policy that the student's run began with."""
    source, revision = (given, None) if given else _known_teacher(student)
    teacher = merge_adapters(
        load_checkpoint(
            source, device="cpu", revision=revision, trust_remote_code=trust_remote_code
        )
    )
    if teacher.policy_type != student.policy_type:
        raise CraftError(
            "There is nothing between these two policies.",
            why=f"the teacher {source} is of type {teacher.policy_type}, the student "
            f"{student.source} of type {student.policy_type}.",
            fix="give --teacher the policy that the student was trained from.",
        )
    return teacher


def _known_teacher(student: Checkpoint) -> tuple[str, str | None]:
    file = student.folder.parent / CONFIG_FILE
    if student.base is not None and not file.is_file():
        return str(student.base), None
    try:
        settings = json.loads(file.read_text("utf-8"))
        source, revision = settings["policy"], settings["revision"]
    except (OSError, ValueError, KeyError) as error:
        raise CraftError(
            f"The teacher of {student.source} is not known.",
            why=f"{file}, where a run of craft's says it, cannot be read "
            f"({type(error).__name__}: {error}).",
            fix="name the policy that it was trained from with --teacher.",
            exit_code=EXIT_USAGE,
        ) from error
    return (str(TEACHER_FOLDER) if source == DEMO else source), revision


def _put_in_place(partial: Path, output: Path) -> None:
    replaced = output.with_name(f".{output.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        output.rename(replaced)
    partial.rename(output)
    shutil.rmtree(replaced, ignore_errors=True)


def _report(plan: MergePlan, output: Path) -> MergeReport:
    student, teacher = plan.student, plan.teacher
    counts: dict[str, int] = {}
    for alpha in sorted(plan.alphas.values()):
        counts[f"{alpha:g}"] = counts.get(f"{alpha:g}", 0) + 1
    return MergeReport(
        output=str(output),
        student=str(student.folder),
        teacher=None if teacher is None else str(teacher.folder),
        alpha=plan.alpha,
        groups={group.pattern: group.alpha for group in plan.groups},
        tensors_by_alpha=counts,
        parameters=sum(p.numel() for p in student.policy.parameters()),
        adapters_merged=plan.adapters_merged,
        other_processor=teacher is not None
        and processor_digest(teacher.preprocess) != processor_digest(student.preprocess),
    )
