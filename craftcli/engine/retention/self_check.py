"""The self-check: with the student at its teacher's weights, L_ret must be 0 to rounding.

Before it, two checks of the cache's manifest: is its teacher known, and is it this student?
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from craftcli.cache.format import Manifest
from craftcli.cache.identity import TEACHER_FIELDS
from craftcli.choices import Amp, LossKind, Mode
from craftcli.engine.execution import Execution
from craftcli.engine.retention.imitation import Imitation
from craftcli.engine.retention.terms import RetentionTerms
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.policies.identity import TeacherIdentity

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}
"""Largest share of the teacher's variance that rounding explains, by the coarsest precision."""

_AMP_NAMES = {Amp.OFF: "float32", Amp.BF16: "bfloat16", Amp.FP16: "float16"}


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """L_ret of the untouched student, in nmse."""

    drift: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether rounding explains the drift."""
        return self.drift <= self.tolerance


def check_known(manifest: Manifest, *, cache: str) -> None:
    """Refuse a cache with an unknown teacher: no policy can get the inputs its teacher saw."""
    if not manifest.teacher.weights_digest:
        raise CraftError(
            f"The cache {cache} cannot be used with a policy.",
            why="it was imported: its teacher is unknown, and another program prepared its inputs.",
            fix="rebuild it from the teacher and the data with craft cache build.",
        )


def check_identity(manifest: Manifest, student: TeacherIdentity, *, cache: str) -> None:
    """Refuse a cache that another teacher made, and name the fields that differ."""
    teacher = manifest.teacher
    differing = [
        name for name in TEACHER_FIELDS if getattr(teacher, name) != getattr(student, name)
    ]
    if not differing:
        return
    first = differing[0]
    raise CraftError(
        f"The cache {cache} was built with another teacher.",
        why=f"{', '.join(differing)} differ: {first} is {_short(getattr(teacher, first))} in "
        f"the cache (from {teacher.source}) and {_short(getattr(student, first))} for "
        f"{student.source}.",
        fix="give --policy the teacher of the cache, or rebuild it with craft cache build; to hold "
        "a different student to this teacher, add --other-student.",
    )


@torch.no_grad()
def self_check(terms: RetentionTerms, execution: Execution | None = None) -> SelfCheck | None:
    """Measure L_ret before the first step, while the student still equals its teacher.

    Runs in full precision, or in that of `execution`. None if no mode has a loss that is 0 there.
    """
    with nullcontext() if execution is None else execution.autocast():
        drifts = [
            loss.total.item()
            for term in terms
            if isinstance(term, Imitation)
            for mode, loss in term.losses(0, loss=LossKind.NMSE).items()
            if mode is not Mode.TOKEN_CE
        ]
    if not drifts or terms.anchors is None:
        return None
    manifest = terms.anchors.manifest
    amp = Amp.OFF if execution is None else execution.amp
    precisions = (manifest.dtype, manifest.teacher.dtype, _AMP_NAMES[amp])
    tolerance = max(TOLERANCE.get(p, 1e-6) for p in precisions)
    return SelfCheck(drift=max(drifts), tolerance=tolerance)


def require_self_check(check: SelfCheck) -> None:
    """Stop a run if L_ret would measure something other than forgetting."""
    if check.passed:
        return
    raise CraftError(
        "Self-check failed: the policy no longer reproduces the cached outputs.",
        why=f"L_ret at the teacher's weights is {check.drift:.3g} (nmse), and rounding explains at "
        f"most {check.tolerance:.0e}. The code, the precision or the device has changed since the "
        "cache was built.",
        fix="rebuild the cache with craft cache build on this machine and with these versions.",
        exit_code=EXIT_CHECK_FAILED,
    )


def _short(value: str) -> str:
    return value[:12]
