"""What a run cost and what it worked on, kept beside its checkpoints for comparisons."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from craftcli.errors import CraftError
from craftcli.run_files import SUMMARY_FILE


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Written when a run begins and at every checkpoint; a run that goes on adds to it."""

    steps: int
    """Steps asked for."""
    steps_done: int
    seconds: float
    """Spent training and saving, over all its parts."""
    peak_memory_bytes: int
    """On the GPU if there is one, else of the process."""
    parameters: int
    trainable_parameters: int
    anchors: int | None
    """Rows that were trained on; None without a cache."""
    anchor_targets: Mapping[str, Any] | None
    """What the cache holds of its teacher: kinds, stack, layers and pooling."""
    anchor_dataset: str | None
    """Fingerprint of the data the anchors are from."""
    teacher: str
    """Digest of the weights that the student is held to, or that a plain run began with."""
    teacher_source: str
    dataset: str
    dataset_fingerprint: str

    @property
    def complete(self) -> bool:
        """Whether the last step was taken."""
        return self.steps_done >= self.steps

    def write(self, run: Path) -> None:
        """Write it whole or not at all."""
        partial = run / f".{SUMMARY_FILE}.partial"
        partial.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")
        partial.replace(run / SUMMARY_FILE)

    @classmethod
    def read(cls, run: Path) -> Self | None:
        """The summary of a run; None when it has none."""
        file = run / SUMMARY_FILE
        try:
            return cls(**json.loads(file.read_text("utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise CraftError(
                f"Cannot read {file}.",
                why=f"{type(error).__name__}: {error}.",
                fix="restore it from a copy, or remove it: the run is then compared without it.",
            ) from error
