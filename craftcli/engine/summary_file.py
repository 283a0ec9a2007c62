"""The summary of a run, for comparisons: what it worked on, its time and its memory."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from craftcli.engine.run_folder import SUMMARY_FILE
from craftcli.errors import CraftError
from craftcli.sealed_json import sealed, unsealed
from craftcli.whole_files import write_text


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Written at the start of a run and at every checkpoint; a resumed run adds to it."""

    steps: int
    """Steps of the whole run."""
    steps_done: int
    seconds: float
    """Time of training and saving, over all parts of a resumed run."""
    peak_memory_bytes: int
    """On the GPU if there is one, else of the process."""
    parameters: int
    trainable_parameters: int
    anchors: int | None
    """Anchors of the cache that are used; None without a cache."""
    anchor_targets: Mapping[str, Any] | None
    """What the cache holds of its teacher: kinds, stack, layers and pooling."""
    anchor_dataset: str | None
    """Fingerprint of the dataset that the anchors were taken from."""
    teacher: str
    """Digest of the teacher's weights, or of the weights that a plain run started with."""
    teacher_source: str
    dataset: str
    dataset_fingerprint: str
    skipped: int = 0
    """Steps that were not finite and changed nothing; 0 in runs of earlier versions."""
    verdict: Mapping[str, Any] | None = None
    """The `Verdict` on the run at its last checkpoint; None in earlier versions."""

    stopped_early: bool = False
    """Whether --patience ended the run."""

    @property
    def complete(self) -> bool:
        """Whether the run has taken its last step."""
        return self.stopped_early or self.steps_done >= self.steps

    def write(self, run: Path) -> None:
        """Write the summary, whole or not at all."""
        write_text(run / SUMMARY_FILE, json.dumps(sealed(asdict(self)), indent=2))

    @classmethod
    def read(cls, run: Path) -> Self | None:
        """The summary of a run; None if it has none."""
        file = run / SUMMARY_FILE
        try:
            return cls(**unsealed(json.loads(file.read_text("utf-8"))))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise CraftError(
                f"Cannot read {file}.",
                why=f"{type(error).__name__}: {error}.",
                fix="restore it from a copy, or remove it: the run is then compared without it.",
            ) from error
