"""Something that happens in a forked process at the n-th time that it writes below a folder.

Python reports every file that is opened, renamed or removed to its audit hooks. Counting them gives
moments that are the same in every run, from the first file to the last, with no clock.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from craftcli.cli.app import app

UNEXPLAINED = 99
"""Exit code of a process whose command failed without an explanation."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_EVENTS = ("os.rename", "os.mkdir", "os.symlink", "os.remove", "os.rmdir", "os.truncate")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The n-th write below a folder, and all that follow."""

    folder: Path
    number: int
    act: Callable[[str, int], None]
    """Called with the event, and how many writes after the first one it comes."""

    def arm(self) -> None:
        """Watch this process until it ends; a hook cannot be removed."""
        seen, folder = [0], str(self.folder)

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open":
                path, _, flags = arguments
                if not isinstance(flags, int) or not flags & _WRITES:
                    return
            elif event in _EVENTS:
                path = arguments[0]
            else:
                return
            if isinstance(path, str | os.PathLike) and str(path).startswith(folder):
                seen[0] += 1
                if seen[0] >= self.number:
                    self.act(event, seen[0] - self.number)

        sys.addaudithook(watch)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a forked command ended."""

    code: int
    """Exit code; minus the signal that ended it."""
    output: str


class HungError(AssertionError):
    """A command did not end: the fault is bad, and the test fails."""


def craft_in_child(
    log: Path, *arguments: str | Path, moment: Moment | None = None, within_s: float = 300
) -> Ended:
    """Run a command in a forked process, with a process group of its own.

    Raises:
        HungError: it did not end within so many seconds; it and all that it started are killed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none of them is used
        child = os.fork()
    if child == 0:
        code = UNEXPLAINED
        try:
            os.setsid()
            file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, 2)
            if moment:
                moment.arm()
            done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
            os.write(file, done.output.encode())
            code = UNEXPLAINED if "no explanation for" in done.output else done.exit_code
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    status = _wait(child, within_s)
    output = log.read_text(errors="replace") if log.exists() else ""
    if status is None:
        command = " ".join(map(str, arguments))
        raise HungError(f"craft {command} did not end within {within_s} s: {output[-600:]}")
    return Ended(code=os.waitstatus_to_exitcode(status), output=output)


def _wait(child: int, within_s: float) -> int | None:
    """The status of a process that has ended; None if it had to be killed."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):  # it has not made its group yet
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def count_writes(log: Path, folder: Path, *arguments: str | Path) -> int:
    """Run a command undisturbed; how many writes below the folder there are."""
    counted = log.with_suffix(".count")

    def count(event: str, after: int) -> None:
        descriptor = os.open(counted, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.write(descriptor, str(after + 1).encode())
        os.close(descriptor)

    moment = Moment(folder=folder, number=1, act=count)
    ended = craft_in_child(log, *arguments, moment=moment)
    if ended.code:
        raise RuntimeError(ended.output)
    return int(counted.read_text())
