"""What `craft eval` found, as it is kept in RUN/evaluations/NAME.json.

    format          1
    policy          source, policy_type, weights_digest of what was evaluated; step if a run's
    drift           null, or a Drift: per layer nmse and cka, l_ret by mode, the action error, and
                    digests of the cache, its teacher and its dataset
    losses          a DatasetLoss for each dataset: mean, by_task, frames, seed, fingerprint
    success         a Success for each environment: rate, interval, and every episode's seed
    left_out        what a run knows of and could not be evaluated, and why

Two drifts compare if their `cache_digest` is the same, two losses if `fingerprint`, `seed` and
`frames` are, two successes if `environment`, `max_steps` and the seeds of the episodes are.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from craftcli.errors import CraftError
from craftcli.evaluation.findings import DatasetLoss, Drift
from craftcli.evaluation.success import Success

FOLDER = "evaluations"
"""In a run's folder, or in that of a policy that craft has merged."""
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PolicyIdentity:
    """Which policy was evaluated."""

    source: str
    policy_type: str
    weights_digest: str
    step: int | None
    """Of the run that made it."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All that was measured of one policy."""

    policy: PolicyIdentity
    drift: Drift | None = None
    losses: tuple[DatasetLoss, ...] = ()
    success: tuple[Success, ...] = ()
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON, in the form that the module describes."""
        return {
            "format": FORMAT,
            "policy": asdict(self.policy),
            "drift": self.drift.to_json() if self.drift else None,
            "losses": [loss.to_json() for loss in self.losses],
            "success": [success.to_json() for success in self.success],
            "left_out": list(self.left_out),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
        drift = document["drift"]
        return cls(
            policy=PolicyIdentity(**document["policy"]),
            drift=Drift.from_json(drift) if drift else None,
            losses=tuple(DatasetLoss.from_json(loss) for loss in document["losses"]),
            success=tuple(Success.from_json(success) for success in document["success"]),
            left_out=tuple(document["left_out"]),
        )

    def save(self, file: Path) -> None:
        """Write it, whole or not at all; an older one of that name is replaced."""
        partial = file.with_name(f".{file.name}.partial")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self.to_json(), indent=2, ensure_ascii=False), "utf-8")
            partial.replace(file)
        except OSError as error:
            raise CraftError(
                f"Cannot write {file}.",
                why=f"{error.strerror or error}.",
                fix="choose another place with --output.",
            ) from error

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read one back, or say what is wrong with the file."""
        try:
            document = json.loads(file.read_text("utf-8"))
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']}, not {FORMAT}")
            return cls.from_json(document)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CraftError(
                f"{file} is no evaluation that craft can read.",
                why=f"{type(error).__name__}: {error}.",
                fix="evaluate again with craft eval.",
            ) from error
