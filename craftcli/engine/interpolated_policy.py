"""A LeRobot checkpoint interpolated between a run and its teacher: `craft merge`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from craftcli.config.run_paths import find_paths
from craftcli.engine.checkpoint_manifest import digest_files, require_unchanged_policy
from craftcli.engine.merge_output import check_merge_output
from craftcli.engine.run_folder import CONFIG_FILE, MERGE_FILE
from craftcli.engine.weight_interpolation import (
    Group,
    choose_alphas,
    interpolate_weights,
    require_same_architecture,
)
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.lerobot.checkpoint import Checkpoint, load_checkpoint
from craftcli.policies.lerobot.identity import same_processors
from craftcli.policies.lerobot.lora import fold_lora, weight_dtypes
from craftcli.policies.lerobot.saving import write_weights
from craftcli.sealed_json import sealed
from craftcli.sources import policy_location
from craftcli.whole_files import whole_folder


@dataclass(frozen=True, kw_only=True)
class InterpolationReport:
    """The written policy and how it was made."""

    output: str
    student: str
    teacher: str | None
    """None if all weights are the student's."""
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
class InterpolationPlan:
    """Two policies and the α of each tensor."""

    student: Checkpoint
    teacher: Checkpoint | None
    alpha: float
    groups: tuple[Group, ...]
    alphas: dict[str, float]
    dtypes: dict[str, torch.dtype]
    adapters_merged: bool

    @property
    def weights(self) -> dict[str, Tensor]:
        """The student's weights, with its LoRA weights folded in."""
        state: dict[str, Tensor] = self.student.policy.state_dict()
        return state


def plan_interpolation(
    source: str,
    *,
    teacher: str | None,
    alpha: float,
    groups: Sequence[Group],
    trust_remote_code: bool = False,
) -> InterpolationPlan:
    """Open the policies, and find every problem before anything is written."""
    require_unchanged_policy(source)
    opened = load_checkpoint(source, device="cpu", trust_remote_code=trust_remote_code)
    needs_teacher = alpha != 1 or any(group.alpha != 1 for group in groups)
    other = None
    if needs_teacher or teacher:
        other = _open_teacher(opened, teacher, trust_remote_code=trust_remote_code)
    dtypes = weight_dtypes(opened.policy)
    student = fold_lora(opened)
    state = student.policy.state_dict()
    alphas = choose_alphas(state, alpha, groups)
    if other is not None:
        require_same_architecture(other.policy.state_dict(), state)
    return InterpolationPlan(
        student=student,
        teacher=other,
        alpha=alpha,
        groups=tuple(groups),
        alphas=alphas,
        dtypes=dtypes,
        adapters_merged=opened.peft is not None,
    )


def write_interpolation(
    plan: InterpolationPlan, output: Path, *, overwrite: bool, on_tensor: Callable[[int], None]
) -> InterpolationReport:
    """Write the interpolated policy, with the student's settings and processors."""
    check_merge_output(output, overwrite=overwrite)
    student, own = plan.student, plan.weights
    others = own if plan.teacher is None else plan.teacher.policy.state_dict()
    weights = interpolate_weights(others, own, plan.alphas, plan.dtypes, on_tensor)
    report = _report(plan, output)
    try:
        with whole_folder(output, replace=True) as folder:
            # The field names the source of the weights; these have no other source.
            student.policy.config.pretrained_path = None
            write_weights(student.policy, folder, weights)
            student.preprocess.save_pretrained(folder)
            student.postprocess.save_pretrained(folder)
            content = {**report.to_json(), "files": digest_files(folder)}
            made = json.dumps(sealed(content), indent=2)
            (folder / MERGE_FILE).write_text(made, "utf-8")
    except (OSError, SafetensorError) as error:
        raise CraftError(
            f"Cannot write to {output}.",
            why=f"{getattr(error, 'strerror', None) or error}.",
            fix="choose another folder with --output.",
        ) from error
    return report


def _open_teacher(student: Checkpoint, given: str | None, *, trust_remote_code: bool) -> Checkpoint:
    """The given teacher, or the policy that the student's run started with."""
    source, revision = (given, None) if given else _known_teacher(student)
    require_unchanged_policy(source)
    teacher = fold_lora(
        load_checkpoint(
            source, device="cpu", revision=revision, trust_remote_code=trust_remote_code
        )
    )
    if teacher.policy_type != student.policy_type:
        raise CraftError(
            "Student and teacher cannot be interpolated: their architectures differ.",
            why=f"the teacher {source} is of type {teacher.policy_type}, the student "
            f"{student.source} of type {student.policy_type}.",
            fix="give --teacher the policy that the student was trained from.",
        )
    return teacher


def _known_teacher(student: Checkpoint) -> tuple[str, str | None]:
    file = student.folder.parent / CONFIG_FILE
    run = file.parent.parent.parent
    if not file.is_file() and (run / CONFIG_FILE).is_file():
        file = run / CONFIG_FILE  # lerobot-train has continued the run
    if student.base is not None and not file.is_file():
        return str(student.base), None
    try:
        settings = find_paths(json.loads(file.read_text("utf-8")), run)
        source, revision = settings["policy"], settings["revision"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CraftError(
            f"The teacher of {student.source} is unknown.",
            why=f"a run of craft names it in {file}, which cannot be read "
            f"({type(error).__name__}: {error}).",
            fix="name the policy that it was trained from with --teacher.",
            exit_code=EXIT_USAGE,
        ) from error
    return policy_location(source), revision


def _report(plan: InterpolationPlan, output: Path) -> InterpolationReport:
    student, teacher = plan.student, plan.teacher
    counts: dict[str, int] = {}
    for alpha in sorted(plan.alphas.values()):
        counts[f"{alpha:g}"] = counts.get(f"{alpha:g}", 0) + 1
    return InterpolationReport(
        output=str(output),
        student=str(student.folder),
        teacher=None if teacher is None else str(teacher.folder),
        alpha=plan.alpha,
        groups={group.pattern: group.alpha for group in plan.groups},
        tensors_by_alpha=counts,
        parameters=sum(p.numel() for p in student.policy.parameters()),
        adapters_merged=plan.adapters_merged,
        other_processor=teacher is not None
        and not same_processors(teacher.preprocess, student.preprocess),
    )
