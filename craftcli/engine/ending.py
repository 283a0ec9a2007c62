"""When a run ends: after its last step, on SIGINT or SIGTERM, or when it is stuck."""

import errno
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from craftcli.distributed import Processes
from craftcli.engine.metrics import StepReport
from craftcli.errors import EXIT_CHECK_FAILED, CraftError

SKIPS_ALLOWED = 25
"""Most steps in a row that may be skipped: float16 needs about 16 to find its loss scale."""


class Interrupt:
    """Remembers whether a signal has requested the end of the run."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: remember the first, raise KeyboardInterrupt on the second."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Inside, SIGINT and SIGTERM only set `requested`; the handlers are restored afterwards."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, interrupt)
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Ending:
    """Decides which step is the last; every process decides the same."""

    def __init__(self, steps: int, processes: Processes) -> None:
        self._steps = steps
        self._processes = processes
        self.skipped = 0
        """Skipped steps in a row, up to now."""

    @property
    def stuck(self) -> bool:
        """Whether too many steps in a row were skipped, or every step of the run."""
        return self.skipped > SKIPS_ALLOWED or self.skipped >= self._steps

    def reached(self, report: StepReport, *, requested: bool) -> bool:
        """Whether this step is the last; a signal to any process ends all of them."""
        self.skipped = self.skipped + 1 if report.skipped else 0
        return self._processes.total(int(requested)) > 0 or report.step == self._steps or self.stuck


def not_finite(report: StepReport, skipped: int, saved: Path) -> CraftError:
    """The error of a run that was stopped by skipped steps."""
    values = {"loss": report.loss, "gradient norm": report.grad_norm}
    if report.retention:
        values["L_ret"] = report.retention.loss
    broken = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    return CraftError(
        f"Training stopped at step {report.step}.",
        why=f"{skipped} steps in a row were not finite ({', '.join(broken)}); none of them changed "
        "the weights.",
        fix=f"lower --lr, or check the dataset for NaN; the state is saved in {saved}.",
    )


def mostly_skipped(skipped: int, steps: int, saved: Path) -> CraftError | None:
    """The error of a finished run that skipped more than half of its steps; None for any other."""
    if 2 * skipped <= steps:
        return None
    return CraftError(
        "Most steps of the run changed nothing.",
        why=f"{skipped} of {steps} steps were not finite and were skipped.",
        fix=f"lower --lr, or check the dataset for NaN, and train again; {saved} holds what the "
        "other steps have learned.",
        exit_code=EXIT_CHECK_FAILED,
    )


@contextmanager
def explained_disk_errors(run: Path) -> Iterator[None]:
    """Turn a full disk, wherever a run notices it, into an error that says so."""
    try:
        yield
    except CraftError:
        raise
    except Exception as error:
        # safetensors has errors of its own, with the system's text in them.
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and "No space left on device" not in str(error):
            raise
        raise CraftError(
            f"Cannot write to {run}: the disk is full.",
            why=f"{type(error).__name__}: {error}.",
            fix="make room. If the run has a checkpoint, craft train --resume continues from it.",
        ) from error
