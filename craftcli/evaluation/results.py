"""The results of an evaluation, and the JSON file that keeps them.

`Evaluation` is the whole file: `Drift` from the teacher, `DatasetLoss` for each dataset, `Success`
for each environment. Nothing here imports torch: `craft compare` reads these files.
"""

import contextlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from craftcli.engine.run_folder import EVALUATIONS_FOLDER as EVALUATIONS_FOLDER
from craftcli.engine.verdict import Verdict
from craftcli.errors import CraftError
from craftcli.sealed_json import sealed, unsealed
from craftcli.whole_files import write_text

FORMAT = 1
"""Version of the files."""
Z_95 = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class PolicyIdentity:
    """Which policy was evaluated."""

    source: str
    policy_type: str
    weights_digest: str
    step: int | None
    """Training step of the checkpoint, if a run made it."""


@dataclass(frozen=True, kw_only=True)
class LayerDrift:
    """How far one layer of the student is from the teacher's."""

    layer: str
    nmse: float
    """Squared error divided by the teacher's variance."""
    cka: float
    """Linear CKA; 1 is the same representation up to rotation and scale."""


@dataclass(frozen=True, kw_only=True)
class ActionError:
    """How far the student's actions are from the teacher's."""

    kind: str
    """`nmse` of predictions, `kl` of action tokens, or `chunk_nmse` of decoded action chunks."""
    value: float
    rows: int


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far a policy has moved from the teacher of a cache, over the cache's rows."""

    cache: str
    cache_digest: str
    """The same for caches of the same teacher, frames, layers and pooling."""
    teacher_digest: str
    dataset_fingerprint: str
    rows: int
    shared_rows: int | None
    """How many of the rows the run was trained to hold: 0 means held out, None means unknown."""
    loss: str
    l_ret: dict[str, float]
    """The retention loss by mode, measured with the loss of the run."""
    layers: tuple[LayerDrift, ...]
    action: ActionError | None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        action = document["action"]
        return cls(
            **{
                **document,
                "layers": tuple(LayerDrift(**layer) for layer in document["layers"]),
                "action": ActionError(**action) if action else None,
            }
        )


@dataclass(frozen=True, kw_only=True)
class DatasetLoss:
    """A policy's mean loss over frames of a dataset."""

    dataset: str
    fingerprint: str
    group: str | None
    """`old` or `new` if it is known to show that skill."""
    frames: int
    seed: int
    """Seed of the draw of frames, and of the noise in the policy's forward pass."""
    mean: float
    by_task: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**document)


def wilson(successes: int, trials: int, *, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a rate, which also holds for few trials and near 0 and 1.

    >>> [round(bound, 3) for bound in wilson(15, 15)]
    [0.796, 1.0]
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"no rate: {successes} of {trials}")
    rate, shrink = successes / trials, 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / shrink
    # At 0 and 1 the bound is exact; rounding would miss it.
    low = 0.0 if successes == 0 else centre - half
    return low, 1.0 if successes == trials else centre + half


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One rollout."""

    seed: int
    success: bool
    steps: int
    error: str | None = None
    """Why its world crashed; the episode then counts as failed."""


@dataclass(frozen=True, kw_only=True)
class Success:
    """Closed-loop success of a policy in one environment."""

    environment: str
    group: str | None
    """`old` or `new` if it is known to show that skill."""
    max_steps: int
    episodes: tuple[Episode, ...]

    @property
    def count(self) -> int:
        """How many episodes succeeded."""
        return sum(episode.success for episode in self.episodes)

    @property
    def rate(self) -> float:
        """The share of episodes that succeeded."""
        return self.count / len(self.episodes)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the rate lies with 95 % confidence (Wilson)."""
        return wilson(self.count, len(self.episodes))

    @property
    def crashed(self) -> tuple[Episode, ...]:
        """Episodes that ended in a crash of the simulator."""
        return tuple(episode for episode in self.episodes if episode.error)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; the rate and its interval are there for people who read the file."""
        return {"rate": self.rate, "interval": list(self.interval), **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(
            environment=document["environment"],
            group=document["group"],
            max_steps=document["max_steps"],
            episodes=tuple(Episode(**episode) for episode in document["episodes"]),
        )


@dataclass(frozen=True, kw_only=True)
class InstructionEffect:
    """How much actions change when only the instruction of a frame does, on one dataset.

    The change is squared and divided by the variance of the actions: 0 means that the instruction
    is not read, about 2 that the actions are as different as those of two frames.
    """

    dataset: str
    group: str | None
    """`old` or `new` if the dataset is known to show that skill."""
    frames: int
    policy: float | None
    """None if the actions do not vary at all."""
    teacher: float | None
    """Of the policy before fine-tuning; None if that is not known, or does not vary."""


@dataclass(frozen=True, kw_only=True)
class InstructionCheck:
    """Whether the policy listens, or why that was not measured."""

    effects: tuple[InstructionEffect, ...] = ()
    skipped: str | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The reverse of `asdict`."""
        effects = tuple(InstructionEffect(**effect) for effect in document["effects"])
        return cls(effects=effects, skipped=document["skipped"])


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything measured of one policy."""

    policy: PolicyIdentity
    drift: Drift | None = None
    losses: tuple[DatasetLoss, ...] = ()
    success: tuple[Success, ...] = ()
    instructions: InstructionCheck | None = None
    """None if no dataset was evaluated on, and in files of earlier versions."""
    left_out: tuple[str, ...] = ()
    """What could not be measured, and why."""
    teacher_losses: tuple[DatasetLoss, ...] = ()
    """Of the teacher on the same frames, as far as they were measured."""
    teacher_success: tuple[Success, ...] = ()
    """Of the teacher in the same episodes, as far as it was measured."""
    when: str | None = field(default=None, compare=False)
    """Time of the evaluation (ISO 8601, UTC); None in files of earlier versions."""
    verdict: Verdict | None = None
    """Whether the run kept to its budget; None without a run, and in files of earlier versions."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values: the content of the file."""
        return {
            "format": FORMAT,
            "policy": asdict(self.policy),
            "drift": self.drift.to_json() if self.drift else None,
            "losses": [loss.to_json() for loss in self.losses],
            "success": [success.to_json() for success in self.success],
            "instructions": asdict(self.instructions) if self.instructions else None,
            "left_out": list(self.left_out),
            "teacher_losses": [loss.to_json() for loss in self.teacher_losses],
            "teacher_success": [success.to_json() for success in self.teacher_success],
            "when": self.when,
            "verdict": self.verdict.to_json() if self.verdict else None,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        drift, instructions = document["drift"], document.get("instructions")
        verdict = document.get("verdict")
        return cls(
            policy=PolicyIdentity(**document["policy"]),
            drift=Drift.from_json(drift) if drift else None,
            losses=tuple(DatasetLoss.from_json(loss) for loss in document["losses"]),
            success=tuple(Success.from_json(success) for success in document["success"]),
            instructions=InstructionCheck.from_json(instructions) if instructions else None,
            left_out=tuple(document["left_out"]),
            teacher_losses=tuple(
                DatasetLoss.from_json(loss) for loss in document.get("teacher_losses", ())
            ),
            teacher_success=tuple(
                Success.from_json(success) for success in document.get("teacher_success", ())
            ),
            when=document.get("when"),
            verdict=Verdict.from_json(verdict) if verdict else None,
        )

    def save(self, file: Path) -> None:
        """Write the file, whole or not at all; an older file of that name is replaced."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(sealed(self.to_json()), indent=2, ensure_ascii=False)
            write_text(file, text)
        except OSError as error:
            raise CraftError(
                f"Cannot write {file}.",
                why=f"{error.strerror or error}.",
                fix="choose another file with --output.",
            ) from error

    def keep(self, folder: Path, name: str) -> Path:
        """Save as NAME.json, NAME-2.json, ...: the first name that no other evaluation has.

        A file with the very same results is left as it is, and its path returned.
        """
        for number in itertools.count(1):
            file = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
            if not file.exists():
                self.save(file)
                return file
            with contextlib.suppress(CraftError):  # a damaged file is left as it is
                if type(self).load(file) == self:
                    return file
        raise AssertionError("there is always a next number")

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read a file.

        Raises:
            CraftError: it cannot be read, or is not an evaluation of this format.
        """
        try:
            document = unsealed(json.loads(file.read_text("utf-8")))
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']}, not {FORMAT}")
            return cls.from_json(document)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CraftError(
                f"{file} is not an evaluation that craft can read.",
                why=f"{type(error).__name__}: {error}.",
                fix="evaluate again with craft eval.",
            ) from error
