"""What measurements of drift and loss give; free of heavy imports, for those who only read it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class LayerDrift:
    """One layer of the student beside the teacher's."""

    layer: str
    nmse: float
    """Squared error over the teacher's variance."""
    cka: float
    """Linear CKA; 1 is the same representation up to rotation and scale."""


@dataclass(frozen=True, kw_only=True)
class ActionError:
    """How far the student's actions are from the teacher's."""

    kind: str
    """nmse of predictions, kl of tokens, or chunk_nmse of the actions that come out in the end."""
    value: float
    rows: int


@dataclass(frozen=True, kw_only=True)
class Drift:
    """What has moved."""

    cache: str
    cache_digest: str
    """The same for caches of the same teacher, frames, layers and pooling."""
    teacher_digest: str
    dataset_fingerprint: str
    rows: int
    shared_rows: int | None
    """How many of them the run was trained to hold: 0 is held out; None when nobody knows."""
    loss: str
    l_ret: dict[str, float]
    """By mode, in the loss of the run."""
    layers: tuple[LayerDrift, ...]
    action: ActionError | None

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
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
    """The mean loss over some frames of a dataset."""

    dataset: str
    fingerprint: str
    group: str | None
    """old or new, where that is known."""
    frames: int
    seed: int
    """Draws the frames, and what the policy draws in its forward pass."""
    mean: float
    by_task: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
        return cls(**document)
