"""What has to be shown, or done, before the first step of a run under retention."""

from dataclasses import dataclass

from craftcli.engine.compatibility import SelfCheck, require_self_check, self_check
from craftcli.engine.opened import OpenedRun
from craftcli.engine.reach import Reach, find_reach, freeze, require_reach
from craftcli.engine.retention import Retention


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What was found."""

    check: SelfCheck | None
    """L_ret before the first step; None for a run that goes on, or nothing to compare with."""
    reach: Reach


def prepare(opened: OpenedRun, retention: Retention) -> Preparation:
    """Show that the constraint is real, or stop; freeze what is to be frozen."""
    check = self_check(retention) if opened.resumed is None else None
    if check is not None and not opened.config.other_student:
        require_self_check(check)
    student = opened.student
    batch = opened.trainer.sample_batch()
    reach = find_reach(student.policy, student.adapter, retention, batch)
    require_reach(reach)
    if opened.config.freeze_downstream:
        freeze(student.policy, reach.downstream)
    return Preparation(check=check, reach=reach)
