"""Trainings that are killed or interrupted at any write, and resumed.

A resumed run must equal an undisturbed one to the bit, and all else in its folder must be there.
"""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from craftcli.engine.run_folder import has_checkpoint
from damage.moments import UNEXPLAINED, Ended, Moment, count_writes, craft_in_child
from damage.tally import Outcome, Tally

SIZES = ("--steps", 6, "--save-every", 2, "--batch-size", 2, "--anchor-batch-size", 2)
SETTINGS = tuple(map(str, (*SIZES, "--log-every", 1, "--mode", "hidden", "--device", "cpu")))
KINDS = ("SIGTERM to the group", "SIGKILL", "SIGINT twice")
KILLED = (0, 130, -signal.SIGKILL, -signal.SIGTERM)
"""How a command may end by them; 0 if it was done before."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """An undisturbed training, with which others are compared."""

    folder: Path
    """Of the run, and of those that are killed."""
    cache: Path
    writes: int
    """How many there are in the folder of the run."""
    outcome: Any

    def arguments(self, run: Path, workers: int) -> tuple[str | Path, ...]:
        """The command of a training like this one."""
        given = ("--cache", self.cache, "-o", run, "--workers", str(workers))
        return ("train", *SETTINGS, *given)


def train_undisturbed(folder: Path, cache: Path) -> Training:
    """Train once; the number of workers does not change the result."""
    folder.mkdir()
    training = Training(folder=folder, cache=cache, writes=0, outcome=None)
    run = folder / "undisturbed"
    writes = count_writes(folder / "log", run, *training.arguments(run, 0))
    return Training(folder=folder, cache=cache, writes=writes, outcome=outcome_of(run))


def outcome_of(run: Path) -> Any:
    """Weights, log and state of a finished run, without times."""
    last = run / "checkpoints/last"
    weights = load_file(last / "pretrained_model/model.safetensors")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    log = [{k: v for k, v in json.loads(x).items() if not k.endswith("_s")} for x in lines]
    state = json.loads((last / "craft_state.json").read_text())
    return {name: v.numpy().tobytes() for name, v in weights.items()}, log, state


def kill_trainings(
    training: Training,
    count: int,
    tally: Tally,
    dice: random.Random,
    *,
    workers: int = 2,
    period: int = 6,
) -> None:
    """Kill trainings in turn by every signal, and resume each.

    One in a `period` has workers, each of which imports LeRobot and takes long to start.
    """
    for number in range(count):
        kind, own = KINDS[number % 3], 0
        if number % period == period - 1:
            kind, own = KINDS[number // period % 3], workers
        write = dice.randint(1, training.writes)
        what = f"{kind} at write {write} of {training.writes}, {own} workers"
        outcome, text = _kill(training, kind, own, write)
        tally.add(f"{kind}, {own} workers", outcome, f"{what}: {text}")


def send(kind: str) -> Callable[[str, int], None]:
    """What a process does to itself at the moment; nothing later."""

    def act(event: str, after: int) -> None:
        if after:
            return
        if kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "SIGTERM to the group":
            os.killpg(0, signal.SIGTERM)
        else:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    return act


def _kill(training: Training, kind: str, workers: int, write: int) -> tuple[Outcome, str]:
    run = training.folder / "killed"
    beside = [note(training.folder / f"killed.{ending}") for ending in ("replaced", "partial")]
    command = training.arguments(run, workers)
    moment = Moment(folder=run, number=write, act=send(kind))
    try:
        killed = craft_in_child(training.folder / "log", *command, moment=moment)
        if killed.code not in KILLED:
            return Outcome.UNEXPLAINED, last_line(killed)
        # A run without a checkpoint is begun again, and replaced whole.
        kept = [*beside, note(run)] if has_checkpoint(run) else beside
        return judge(training, run, finish(training, run), kept)
    finally:
        # Otherwise one fault would be blamed on the next.
        for place in (run, *{own.parent for own in beside}):
            shutil.rmtree(place, ignore_errors=True)


def finish(training: Training, run: Path) -> Ended:
    """Resume a run, without workers; one without a checkpoint is begun again."""
    log = training.folder / "log"
    if has_checkpoint(run):
        return craft_in_child(log, "train", "--resume", run, "--workers", "0")
    return craft_in_child(log, *training.arguments(run, 0), "--overwrite")


def judge(training: Training, run: Path, resumed: Ended, kept: list[Path]) -> tuple[Outcome, str]:
    """What became of a run that was disturbed and is finished now."""
    if resumed.code == UNEXPLAINED:
        return Outcome.UNEXPLAINED, last_line(resumed)
    if resumed.code:
        return Outcome.LOST, f"it could not be finished: {last_line(resumed)}"
    gone = [str(own) for own in kept if not own.exists()]
    if gone:
        return Outcome.LOST, f"{', '.join(gone)} is gone"
    if outcome_of(run) != training.outcome:
        return Outcome.SILENT, "the run ended otherwise than the undisturbed one"
    return Outcome.HARMLESS, ""


def note(folder: Path) -> Path:
    """A file of the user's own."""
    folder.mkdir(exist_ok=True)
    (folder / "notes.txt").write_text("mine")
    return folder / "notes.txt"


def last_line(ended: Ended) -> str:
    """How a command ended, and the end of what it said."""
    return f"exit {ended.code}: {ended.output[-600:]}"
