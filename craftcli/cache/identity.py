"""Compares the teacher and the dataset of a cache with those of a run, field by field."""

from dataclasses import dataclass
from typing import Any

from craftcli.cache.format import Manifest
from craftcli.policies.identity import DatasetIdentity, TeacherIdentity

TEACHER_FIELDS = ("policy_type", "weights_digest", "config_digest", "processor_digest")
"""The fields that identify a teacher; its location does not matter."""
DATASET_FIELDS = ("fingerprint", "episodes", "frames")
"""The fingerprint decides; the sizes, which it covers, show how a dataset differs."""


@dataclass(frozen=True, kw_only=True)
class FieldMatch:
    """One field of a cache's identity and the same field of the given policy or dataset."""

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
    """Compare the dataset of a cache with another; their names may differ."""
    return _match("dataset", DATASET_FIELDS, manifest.dataset, given)


def unnamed_teacher_reason(manifest: Manifest) -> str:
    """Why the teacher of a cache was not run."""
    return (
        "craft opens no policy because a cache names it; give the teacher, "
        f"{manifest.teacher.source}, with --policy"
    )


def _match(part: str, fields: tuple[str, ...], cached: Any, given: Any) -> list[FieldMatch]:
    return [
        FieldMatch(
            field=f"{part}.{name}",
            cached=str(getattr(cached, name)),
            given=str(getattr(given, name)),
        )
        for name in fields
    ]
