"""Whether a cache, a student and its preprocessor belong together, and L_ret = 0 to prove it."""

from dataclasses import dataclass

import torch

from craftcli.cache.format import Manifest, TeacherIdentity
from craftcli.cache.matching import TEACHER_FIELDS
from craftcli.choices import Amp, LossKind, Mode
from craftcli.engine.imitation import Imitation
from craftcli.engine.losses import RetentionLoss
from craftcli.engine.retention import Retention
from craftcli.errors import EXIT_CHECK_FAILED, CraftError

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}
"""Share of the teacher's variance that rounding may account for, by the coarsest precision."""


_AMP_NAMES = {Amp.OFF: "float32", Amp.BF16: "bfloat16", Amp.FP16: "float16"}


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """L_ret of the untouched student, in nmse."""

    drift: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the drift is rounding."""
        return self.drift <= self.tolerance


def check_known(manifest: Manifest, *, cache: str) -> None:
    """Refuse a cache whose rows no policy of ours can be shown as the teacher saw them."""
    if not manifest.teacher.weights_digest:
        raise CraftError(
            f"The cache {cache} cannot be trained with.",
            why="it was imported: its teacher is unknown, and its inputs are another program's.",
            fix="rebuild it from the teacher and the data with craft cache build.",
        )


def check_identity(manifest: Manifest, student: TeacherIdentity, *, cache: str) -> None:
    """Refuse a cache that another teacher made, naming what differs."""
    teacher = manifest.teacher
    differing = [
        name for name in TEACHER_FIELDS if getattr(teacher, name) != getattr(student, name)
    ]
    if not differing:
        return
    first = differing[0]
    raise CraftError(
        f"The cache {cache} was built with another teacher.",
        why=f"its {', '.join(differing)} differ: {first} is {_short(getattr(teacher, first))} in "
        f"the cache (from {teacher.source}) and {_short(getattr(student, first))} for "
        f"{student.source}.",
        fix="give --policy the teacher of the cache, or rebuild it with craft cache build; to hold "
        "a different student to this teacher, add --other-student.",
    )


@torch.no_grad()
def self_check(retention: Retention) -> SelfCheck | None:
    """Measure L_ret before the first step, where the student still is its teacher.

    None when no term compares with something that is 0 there.
    """
    terms = [term for term in retention.terms if isinstance(term, Imitation)]
    drifts = [
        loss.total.item()
        for term in terms
        for mode, loss in _in_nmse(term, retention).items()
        if mode is not Mode.TOKEN_CE
    ]
    if not drifts or retention.anchors is None:
        return None
    manifest = retention.anchors.manifest
    precisions = (manifest.dtype, manifest.teacher.dtype, _AMP_NAMES[retention.execution.amp])
    tolerance = max(TOLERANCE.get(p, 1e-6) for p in precisions)
    return SelfCheck(drift=max(drifts), tolerance=tolerance)


def _in_nmse(term: Imitation, retention: Retention) -> dict[Mode, RetentionLoss]:
    with retention.execution.autocast():
        return term.losses(0, loss=LossKind.NMSE)


def require_self_check(check: SelfCheck) -> None:
    """Stop a run whose retention loss would measure something other than forgetting."""
    if check.passed:
        return
    raise CraftError(
        "The student at its teacher's weights does not give what the teacher gave.",
        why=f"L_ret is {check.drift:.3g} (nmse) where at most {check.tolerance:.0e} is rounding: "
        "the policy computes something else than it did when the cache was built (other code, "
        "precision or device).",
        fix="rebuild the cache with craft cache build on this machine and these versions.",
        exit_code=EXIT_CHECK_FAILED,
    )


def _short(value: str) -> str:
    return value[:12]
