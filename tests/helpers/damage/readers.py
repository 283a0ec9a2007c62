"""What craft reads of an artefact, and what became of a fault of one of its files.

A reader gives all that the command uses, as plain values: what is equal to the undisturbed result
was not harmed.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from craftcli.cache.format import layer_names
from craftcli.cache.reading.reader import CacheReader
from craftcli.cli.app import app
from craftcli.compare.compare import compare_runs
from craftcli.compare.runs import read_sources
from craftcli.distributed import Processes
from craftcli.engine.resuming import read_run, verify_checkpoint
from craftcli.engine.summary_file import RunSummary
from craftcli.errors import CraftError
from craftcli.evaluation.subject import open_subject
from damage.artefacts import Artefacts
from damage.files import FileFault, damaged, files_below, random_fault
from damage.tally import Outcome, Tally


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a command gave."""

    result: Any
    says: tuple[str, ...] = ()
    """What it says is missing or cannot be checked."""


type Reader = Callable[[Path], Reading]


class UnexplainedError(Exception):
    """A command failed without an explanation."""


def craft_json(*arguments: str | Path | int) -> Any:
    """The JSON of a command; a failure is an error that explains itself, or does not."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if done.exit_code == 0:
        return json.loads(done.stdout)
    explained = "Fix:" in done.stderr and "no explanation for" not in done.stderr
    if not explained or (done.exception and not isinstance(done.exception, SystemExit)):
        raise UnexplainedError(f"{done.exception!r} {done.output}")
    raise CraftError("The command failed.", why=done.stderr, fix="", exit_code=done.exit_code)


def inspect_run(run: Path) -> Reading:
    """`craft inspect`."""
    found = craft_json("inspect", run)
    unchecked = [c["folder"] for c in found["checkpoints"] if not c["has_digests"]]
    without = [] if found["evaluations"] else ["there is no evaluation"]
    # --resume refuses what has changed.
    other = [f"{d['kind']} {d['state']}" for d in found["depends"] if d["state"] != "unchanged"]
    return Reading(result=found, says=(*unchecked, *without, *other))


def resume(run: Path) -> Reading:
    """All that `craft train --resume` looks at before it loads the files that it has checked."""
    resumed = read_run(run, {}, Processes())
    notes = verify_checkpoint(resumed, Processes())
    summary = RunSummary.read(run)
    result = [resumed.config.to_json(), resumed.state, summary and asdict(summary)]
    return Reading(result=result, says=notes)


def compare(source: Path) -> Reading:
    """`craft compare`, without the drawing: the table and the points of the curves."""
    found = compare_runs([source])
    curves = [(record.arm, record.metrics) for record in read_sources([source]).records]
    damage = tuple(error.what for error in found.damage)
    if damage:
        raise found.damage[0]
    return Reading(result=(found.to_json(), curves), says=found.notes)


def open_policy(run: Path) -> Reading:
    """What `craft eval` opens: weights, settings and processors."""
    subject = open_subject(str(run), device="cpu")
    policy = subject.checkpoint.policy
    weights = {name: v.numpy().tobytes() for name, v in policy.state_dict().items()}
    steps = [*subject.checkpoint.preprocess.steps, *subject.checkpoint.postprocess.steps]
    processors = [(type(step).__name__, repr(step.get_config())) for step in steps]
    settings = subject.config and subject.config.to_json()
    step = subject.identity.step
    return Reading(result=(weights, processors, settings, step, repr(policy.config)))


def verify_cache(cache: Path) -> Reading:
    """`craft cache inspect --verify`."""
    found = craft_json("cache", "inspect", cache, "--verify", "--verify-rows", 0)
    # The metadata of a group may be missing: nothing is read from it, but it takes some bytes.
    return Reading(result={name: found[name] for name in found if name != "size_bytes"})


def read_cache(cache: Path) -> Reading:
    """All that a training takes from a cache."""
    reader = CacheReader.open(cache)
    rows = {name: reader.read_all(name).tobytes() for name in reader.array_names()}
    layers = {name: reader.stats(name) for name in layer_names(reader.manifest)}
    stats = {name: (s.mean.tobytes(), s.variance.tobytes()) for name, s in layers.items()}
    manifest = reader.manifest
    return Reading(result=(rows, stats, reader.tasks, manifest.layers, manifest.pooling))


@dataclass(frozen=True, kw_only=True)
class Target:
    """An artefact, its files, and the readers that a fault of one of them concerns."""

    folder: Path
    files: Sequence[Path]
    readers: Mapping[str, Reader]
    undisturbed: Mapping[str, Reading]
    share: int
    """How often it is chosen."""


def find_targets(artefacts: Artefacts) -> dict[str, Target]:
    """The artefacts by their names, each read once undisturbed."""
    run, cache, sweep = artefacts.run, artefacts.cache, artefacts.sweep
    of_run: dict[str, Reader] = {"inspect": inspect_run, "resume": resume, "compare": compare}
    of_policy: dict[str, Reader] = {**of_run, "eval": open_policy}
    policy = files_below(run / "checkpoints/000006/pretrained_model")
    rest = [file for file in files_below(run) if file not in policy]
    elsewhere = [file for file in files_below(sweep) if not file.is_relative_to(cache)]
    # What `craft compare` reads, among much that it does not.
    records = [f for f in elsewhere if "checkpoints" not in f.parts and ".json" in f.suffix]
    return {
        "run": _target(run, rest, of_run, 4),
        "policy of a run": _target(run, policy, of_policy, 1),
        "cache": _target(
            cache, files_below(cache), {"verify": verify_cache, "read": read_cache}, 4
        ),
        "merged policy": _target(
            artefacts.merged,
            [file for file in files_below(artefacts.merged) if "evaluations" not in file.parts],
            {"eval": open_policy},
            1,
        ),
        "LoRA run": _target(artefacts.lora, files_below(artefacts.lora), of_run, 1),
        "data of a run": _target(
            artefacts.lora, files_below(artefacts.data), {"inspect": inspect_run}, 1
        ),
        "policy under LoRA weights": _target(
            artefacts.lora,
            files_below(artefacts.base),
            {"inspect": inspect_run, "eval": open_policy},
            1,
        ),
        "sweep": _target(sweep, elsewhere, {"compare": compare}, 2),
        "results": _target(
            sweep,
            records,
            {"compare": compare},
            2,
        ),
    }


def _target(
    folder: Path, files: Sequence[Path], readers: Mapping[str, Reader], share: int
) -> Target:
    undisturbed = {name: read(folder) for name, read in readers.items()}
    return Target(folder=folder, files=files, readers=readers, undisturbed=undisturbed, share=share)


def damage_files(artefacts: Artefacts, count: int, tally: Tally, dice: random.Random) -> None:
    """Damage one file after the other, and count what becomes of it; first one of each artefact."""
    targets = find_targets(artefacts)
    names = list(targets)
    shares = [target.share for target in targets.values()]
    for name in [*names, *dice.choices(names, shares, k=max(count - len(names), 0))][:count]:
        fault = random_fault(targets[name].files, dice)
        outcome, text = _outcome(targets[name], fault)
        tally.add(f"{name}: {fault.kind}", outcome, text)


def _outcome(target: Target, fault: FileFault) -> tuple[Outcome, str]:
    """The worst that any reader made of a fault."""
    found: dict[Outcome, str] = {}
    before = _tree(target.folder)
    with damaged(fault):
        present = {entry for entry in before if entry != fault.file or fault.file.exists()}
        for name, read in target.readers.items():
            outcome, text = _judge(read, target.folder, target.undisturbed[name])
            found.setdefault(outcome, f"{fault}: {name}: {text}")
        if present != _tree(target.folder):
            found[Outcome.LOST] = f"{fault}: {present ^ _tree(target.folder)}"
    worst = (Outcome.LOST, Outcome.SILENT, Outcome.UNEXPLAINED, Outcome.FOUND, Outcome.SHOWN)
    outcome = next((each for each in worst if each in found), Outcome.HARMLESS)
    return outcome, found[outcome]


def _judge(read: Reader, folder: Path, undisturbed: Reading) -> tuple[Outcome, str]:
    try:
        now = read(folder)
    except CraftError as error:
        return Outcome.FOUND, str(error)
    except Exception as error:
        return Outcome.UNEXPLAINED, f"{type(error).__name__}: {error}"
    if now.result == undisturbed.result:
        return Outcome.HARMLESS, ""
    if set(now.says) - set(undisturbed.says):
        return Outcome.SHOWN, str(now.says)
    return Outcome.SILENT, _difference(undisturbed.result, now.result)


def _difference(before: Any, now: Any) -> str:
    """The first part of two results that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
        return f"{keys[0]}: {_difference(before.get(keys[0]), now.get(keys[0]))}"
    if isinstance(before, list | tuple) and isinstance(now, list | tuple):
        for number, (one, other) in enumerate(zip(before, now, strict=False)):
            if one != other:
                return f"{number}: {_difference(one, other)}"
    return f"{str(before)[:80]} became {str(now)[:80]}"


def _tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))
