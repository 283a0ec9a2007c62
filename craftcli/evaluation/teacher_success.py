"""The success of a run's teacher on the same episodes; kept with the run, so it is measured once.

The teacher acts through the processors of the run, as the student does, so that both get their
inputs and give their actions in the same units.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from craftcli.errors import CraftError
from craftcli.evaluation.results import EVALUATIONS_FOLDER, Success
from craftcli.evaluation.simulators.base import Environment
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.identity import processor_digest, weights_digest
from craftcli.sealed_json import sealed, unsealed
from craftcli.whole_files import write_text

TEACHER_FOLDER = "teacher"
"""In the folder of evaluations: a file for each environment in which the teacher was run."""


def teacher_success(
    teacher: Checkpoint,
    environment: Environment,
    seeds: range,
    home: Path | None,
    measure: Callable[[], Success],
) -> Success:
    """The success of a teacher, read from a run's folder (`home`) or measured and kept there."""
    file = None if home is None else _file(home, teacher, environment, seeds)
    if file is not None and (known := _read(file)) is not None:
        return known
    found = measure()
    # The name of the file covers all that a result depends on, except crashes.
    if file is not None and not found.crashed:
        _keep(file, found)
    return found


def _file(home: Path, teacher: Checkpoint, environment: Environment, seeds: range) -> Path:
    parts: list[Any] = [
        weights_digest(*teacher.weight_files),
        processor_digest(teacher.preprocess),
        processor_digest(teacher.postprocess),
        [environment.name, environment.max_steps, environment.group],
        [seeds.start, seeds.stop],
    ]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return home / EVALUATIONS_FOLDER / TEACHER_FOLDER / f"{digest}.json"


def _read(file: Path) -> Success | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return Success.from_json(unsealed(json.loads(file.read_text("utf-8"))))
    return None  # not there, or damaged: it is measured again


def _keep(file: Path, found: Success) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(sealed(found.to_json()), indent=2))
    except OSError as error:
        raise CraftError(
            f"Cannot write {file}.",
            why=f"{error.strerror or error}.",
            fix="make the folder writable, or add --no-teacher-success.",
        ) from error
