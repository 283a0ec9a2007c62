"""Which policy and dataset a cache belongs to, and what differs from those at hand, by field."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craftcli.cache.format import DatasetIdentity, Manifest, TeacherIdentity
from craftcli.config import DEMO

TEACHER_FIELDS = ("policy_type", "weights_digest", "config_digest", "processor_digest")
"""What makes a policy the teacher; where it lies does not."""
DATASET_FIELDS = ("fingerprint", "episodes", "frames")
"""The fingerprint decides; the sizes in it tell how a dataset differs."""
_DEMO_TYPE = "craft_tiny_pi0_fast"


@dataclass(frozen=True, kw_only=True)
class FieldMatch:
    """One field of a cache's identity beside the same field of what was given."""

    field: str
    """Name in the manifest, such as teacher.weights_digest."""
    cached: str
    given: str

    @property
    def matches(self) -> bool:
        """Whether they are the same."""
        return self.cached == self.given

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "field": self.field,
            "matches": self.matches,
            "cached": self.cached,
            "given": self.given,
        }


def match_teacher(manifest: Manifest, given: TeacherIdentity) -> list[FieldMatch]:
    """Compare the teacher of a cache with a policy."""
    return _match("teacher", TEACHER_FIELDS, manifest.teacher, given)


def match_dataset(manifest: Manifest, given: DatasetIdentity) -> list[FieldMatch]:
    """Compare the dataset of a cache with another, whatever either is called."""
    return _match("dataset", DATASET_FIELDS, manifest.dataset, given)


def teacher_at_hand(manifest: Manifest) -> str | None:
    """What `--policy` would have to be for the cache's teacher, if that is on this machine."""
    if Path(manifest.teacher.source).expanduser().is_dir():
        return manifest.teacher.source
    # The demo's teacher comes with craft, wherever it was installed when the cache was built.
    return DEMO if manifest.teacher.policy_type == _DEMO_TYPE else None


def not_at_hand(manifest: Manifest) -> str:
    """Why the teacher that a manifest names was not run."""
    return f"the teacher {manifest.teacher.source} is no folder here; give it with --policy"


def _match(part: str, fields: tuple[str, ...], cached: Any, given: Any) -> list[FieldMatch]:
    return [
        FieldMatch(
            field=f"{part}.{name}",
            cached=str(getattr(cached, name)),
            given=str(getattr(given, name)),
        )
        for name in fields
    ]
