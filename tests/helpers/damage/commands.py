"""Merges, evaluations and sweeps that are killed at any write, and done again.

The second time must give what an undisturbed command gives, and all else must be there.
"""

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craftcli.evaluation.results import Evaluation
from damage.artefacts import Artefacts
from damage.files import contents_of
from damage.kills import KILLED, KINDS, last_line, note, outcome_of, send
from damage.moments import UNEXPLAINED, Moment, count_writes, craft_in_child
from damage.tally import Outcome, Tally

NAMES = ("merge", "evaluation", "sweep")
_SWEEP_WRITES = 140
"""About as many as a sweep makes; a kill that comes later finds it done."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that can be killed, and what it makes."""

    arguments: tuple[str | Path, ...]
    again: tuple[str, ...]
    """What is added the second time."""
    watched: Path
    """The folder in which it writes."""
    writes: int
    prepare: Callable[[], None]
    """Removes what it is to make."""
    outcome: Callable[[], Any]
    """What it has made, without times."""
    expected: Any


def kill_commands(
    artefacts: Artefacts, folder: Path, count: int, tally: Tally, dice: random.Random
) -> None:
    """Kill commands in turn, by any signal, and do each again."""
    folder.mkdir(parents=True)
    known: dict[str, Command] = {}
    for number in range(count):
        name, kind = NAMES[number % len(NAMES)], dice.choice(KINDS)
        with _put_back(artefacts.sweep, folder / "before"):
            known[name] = known.get(name) or _command(name, artefacts, folder)
        command = known[name]
        write = dice.randint(1, command.writes)
        with _put_back(artefacts.sweep, folder / "before"):
            outcome, text = _kill(command, kind, write, folder / "log")
        tally.add(f"{kind}: {name}", outcome, f"{kind} of {name} at write {write}: {text}")


def _command(name: str, artefacts: Artefacts, folder: Path) -> Command:
    make = {"merge": _merge, "evaluation": _evaluation, "sweep": _sweep}[name]
    return make(artefacts, folder)


def _merge(artefacts: Artefacts, folder: Path) -> Command:
    work, log = folder / "work", folder / "log"
    output = work / "merged"
    work.mkdir()
    arguments = ("merge", artefacts.run, "--alpha", "0.5", "-o", output)
    writes = count_writes(log, work, *arguments)
    return Command(
        arguments=arguments,
        again=("--overwrite",),
        watched=work,
        writes=writes,
        prepare=lambda: shutil.rmtree(output, ignore_errors=True),
        outcome=lambda: contents_of(output),
        expected=contents_of(output),
    )


def _evaluation(artefacts: Artefacts, folder: Path) -> Command:
    run = artefacts.run
    few = ("--env", "demo:red", "--episodes", "1", "--samples", "2", "--device", "cpu")
    arguments = ("eval", run, *few)
    writes = count_writes(folder / "log", run, *arguments)
    return Command(
        arguments=arguments,
        again=(),
        watched=run,
        writes=writes,
        prepare=lambda: None,
        outcome=lambda: _evaluations(run),
        expected=_evaluations(run),
    )


def _sweep(artefacts: Artefacts, folder: Path) -> Command:
    """A sweep that has its cache, and neither the run nor the merged policy."""
    run, merged = artefacts.run, artefacts.merged

    def outcome() -> Any:
        made = contents_of(merged)
        policy = {name: own for name, own in made.items() if not name.startswith("evaluations")}
        return outcome_of(run), policy, _evaluations(run), _evaluations(merged)

    def prepare() -> None:
        for made in (run, merged):
            shutil.rmtree(made)

    return Command(
        arguments=("compare", "--sweep", artefacts.sweep_file, "-o", folder / "report"),
        again=(),
        watched=artefacts.sweep,
        writes=_SWEEP_WRITES,
        prepare=prepare,
        outcome=outcome,
        expected=outcome(),
    )


def _evaluations(run: Path) -> dict[str, Evaluation]:
    """The evaluations of a run; the time of one does not count."""
    return {file.name: Evaluation.load(file) for file in (run / "evaluations").glob("*.json")}


def _kill(command: Command, kind: str, write: int, log: Path) -> tuple[Outcome, str]:
    command.prepare()
    mine = [note(command.watched / name) for name in ("mine", "merged.partial", "merged.replaced")]
    moment = Moment(folder=command.watched, number=write, act=send(kind))
    killed = craft_in_child(log, *command.arguments, moment=moment)
    if killed.code not in KILLED:
        return Outcome.UNEXPLAINED, last_line(killed)
    again = craft_in_child(log, *command.arguments, *command.again)
    if again.code == UNEXPLAINED:
        return Outcome.UNEXPLAINED, last_line(again)
    if again.code:
        return Outcome.LOST, f"it could not be done again: {last_line(again)}"
    if gone := [str(own) for own in mine if not own.exists()]:
        return Outcome.LOST, f"{', '.join(gone)} is gone"
    if command.outcome() != command.expected:
        return Outcome.SILENT, "it made something else than the undisturbed one"
    return Outcome.HARMLESS, ""


@contextlib.contextmanager
def _put_back(folder: Path, copy: Path) -> Iterator[None]:
    """The folder as it was afterwards, whatever happens to it."""
    shutil.copytree(folder, copy, symlinks=True)
    try:
        yield
    finally:
        shutil.rmtree(folder)
        shutil.copytree(copy, folder, symlinks=True)
        shutil.rmtree(copy)
