"""Trainings, builds and merges on a disk that is full from some write on.

From that write on nothing can be created below the folder; or, as some files are not written by
Python, no file may grow beyond some bytes. The command must say so, and keep what was there; with
room again, the same command ends as if nothing had happened.
"""

import errno
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

from damage.artefacts import Artefacts
from damage.files import contents_of
from damage.kills import Training, finish, judge
from damage.moments import UNEXPLAINED, Moment, count_writes, craft_in_child
from damage.tally import Outcome, Tally

_CREATES = ("open", "os.mkdir", "os.symlink")
BUILD = ("cache", "build", "--samples", "16", "--device", "cpu", "--images", "embed")


def no_room(event: str, after: int) -> None:
    """Fail as the system does when the disk is full; what exists can be renamed and removed."""
    if event in _CREATES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_growth(size: int) -> Callable[[str, int], None]:
    """Allow no file to grow beyond some bytes, also where Python does not see the write."""

    def act(event: str, after: int) -> None:
        if not after:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    return act


def fill_trainings(training: Training, count: int, tally: Tally, dice: random.Random) -> None:
    """Fill the disk during trainings, then resume them."""
    for number in range(count):
        run = training.folder / "full"
        # The first one early enough that something must still be written.
        write = dice.randint(1, training.writes if number else training.writes // 2)
        act, what = _full(number, write, dice)
        moment = Moment(folder=run, number=write, act=act)
        log = training.folder / "log"
        ended = craft_in_child(log, *training.arguments(run, 0), moment=moment)
        outcome, text = Outcome.UNEXPLAINED, ended.output[-600:]
        if ended.code != UNEXPLAINED and ended.code >= 0:
            outcome, text = judge(training, run, finish(training, run), [])
            if outcome is Outcome.HARMLESS and ended.code:
                outcome = Outcome.FOUND
        tally.add("full disk: training", outcome, f"{what}: {text}")
        shutil.rmtree(run, ignore_errors=True)


def fill_others(
    artefacts: Artefacts, folder: Path, count: int, tally: Tally, dice: random.Random
) -> None:
    """Fill the disk while a cache is built or a policy merged, then do it again."""
    work, log = folder / "work", folder / "log"
    work.mkdir(parents=True)
    merge = ("merge", artefacts.run, "--alpha", "0.5")
    commands: dict[str, tuple[str | Path, ...]] = {"cache": BUILD, "merge": merge}
    writes = {
        name: count_writes(log, work, *command, "-o", work / f"{name}.whole")
        for name, command in commands.items()
    }
    for number in range(count):
        name = ("cache", "merge")[number % 2]
        write = dice.randint(1, writes[name] if number >= 2 else writes[name] // 2)
        act, what = _full(number // 2, write, dice)
        moment = Moment(folder=work, number=write, act=act)
        outcome, text = _fill(work, log, name, commands[name], moment)
        tally.add(f"full disk: {name}", outcome, f"{what}: {text}")


def _full(number: int, write: int, dice: random.Random) -> tuple[Callable[[str, int], None], str]:
    if number % 2 == 0:
        return no_room, f"no room from write {write}"
    size = dice.randrange(2_000_000)
    return no_growth(size), f"no file above {size} bytes from write {write}"


def _fill(
    folder: Path, log: Path, name: str, command: tuple[str | Path, ...], moment: Moment
) -> tuple[Outcome, str]:
    output = folder / f"{name}.new"
    failed = craft_in_child(log, *command, "-o", output, moment=moment)
    if failed.code == UNEXPLAINED or failed.code < 0:
        return Outcome.UNEXPLAINED, failed.output[-600:]
    if failed.code and output.exists():
        return Outcome.SILENT, "what could not be written is there"
    if failed.code:
        # What a build has done is kept, and must not be in the way.
        again = craft_in_child(log, *command, "-o", output, *(_resume(name, folder)))
        if again.code:
            return Outcome.LOST, f"it could not be done again: {again.output[-600:]}"
    same = contents_of(output) == contents_of(folder / f"{name}.whole")
    shutil.rmtree(output)
    if not same:
        return Outcome.SILENT, "it is not what it is on a disk with room"
    return (Outcome.FOUND if failed.code else Outcome.HARMLESS), ""


def _resume(name: str, folder: Path) -> tuple[str, ...]:
    partial = folder / f"{name}.new.partial"
    return ("--resume",) if name == "cache" and partial.exists() else ()
