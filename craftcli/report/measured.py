"""What evaluations say of a policy, as far as a comparison needs it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from craftcli.evaluation.record import FOLDER, Evaluation
from craftcli.evaluation.success import Success


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number and what it was measured on; numbers on other things are not comparable."""

    value: float
    basis: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The latest of every kind that was measured of the latest policy."""

    policy: str
    """Digest of its weights."""
    successes: Mapping[str, Success]
    """By the name of the environment."""
    drift: Quantity | None
    """Of the hidden states, in nmse, mean over layers."""
    action_error: Quantity | None
    """Distance of the actions to the teacher's."""


def read_measured(source: Path) -> Measured | None:
    """Read the evaluations in a folder, or a single one; None when there are none."""
    files = [source] if source.is_file() else list((source / FOLDER).glob("*.json"))
    found = [Evaluation.load(file) for file in sorted(files, key=lambda f: f.stat().st_mtime)]
    # Of a run that went on, what was measured before says nothing of the policy it has now.
    last = max((evaluation.policy.step or 0 for evaluation in found), default=0)
    measured = None
    for evaluation in found:
        if (evaluation.policy.step or 0) == last:
            measured = _joined(measured, evaluation)
    return measured


def _joined(before: Measured | None, later: Evaluation) -> Measured:
    drift, action = later.drift, later.drift and later.drift.action
    moved = error = None
    if drift and drift.layers:
        nmse = fmean(layer.nmse for layer in drift.layers)
        moved = Quantity(value=nmse, basis=drift.cache_digest)
    if drift and action:
        basis = f"{drift.cache_digest} {action.kind} {action.rows}"
        error = Quantity(value=action.value, basis=basis)
    successes = {success.environment: success for success in later.success}
    return Measured(
        policy=later.policy.weights_digest,
        successes={**(before.successes if before else {}), **successes},
        drift=moved or (before.drift if before else None),
        action_error=error or (before.action_error if before else None),
    )
