"""Whether the rows of several caches can stand in one, and what differs when they cannot."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from craftcli.cache.format import Manifest, TeacherIdentity
from craftcli.cache.reader import CacheReader
from craftcli.errors import CraftError

# All other fields must agree, also those that a later version of the format adds.
_MAY_DIFFER = frozenset(
    {
        "format_version",
        "complete",
        "rows",
        "rows_per_chunk",
        "sampling",
        "prompts_digest",
        "seed",
        "teacher",
        "dataset",
        "versions",
    }
)
_TEACHER_MAY_DIFFER = frozenset({"source", "revision"})


def check_mergeable(sources: Sequence[CacheReader]) -> None:
    """Refuse caches of different teachers or settings, or that point into different datasets.

    Raises:
        CraftError: names every field and array that differs.
    """
    for source in sources[1:]:
        _check_alike(sources[0], source)
    _check_images(sources)


def _check_alike(first: CacheReader, other: CacheReader) -> None:
    differing = [
        *_differences(Manifest, first.manifest, other.manifest, _MAY_DIFFER, ""),
        *_differences(
            TeacherIdentity,
            first.manifest.teacher,
            other.manifest.teacher,
            # Without digests, where it came from is all that is known of a teacher.
            _TEACHER_MAY_DIFFER if first.manifest.teacher.weights_digest else frozenset(),
            "teacher.",
        ),
        *_array_differences(first, other),
    ]
    if differing:
        raise CraftError(
            f"{first.path} and {other.path} cannot be merged.",
            why=f"they differ in {'; '.join(differing)}.",
            fix="merge caches of the same teacher built with the same settings.",
        )


def _differences(
    cls: type[Any], first: Any, other: Any, may_differ: frozenset[str], prefix: str
) -> list[str]:
    pairs = {
        entry.name: (getattr(first, entry.name), getattr(other, entry.name))
        for entry in fields(cls)
        if entry.name not in may_differ
    }
    return [
        f"{prefix}{name} ({_short(ours)} and {_short(theirs)})"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]


def _array_differences(first: CacheReader, other: CacheReader) -> list[str]:
    ours, theirs = (
        {name: reader.spec(name) for name in reader.array_names()} for reader in (first, other)
    )
    # What follows from the manifest is named there.
    return [
        f"array {name}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name) and not name.startswith("hidden")
    ]


def _check_images(sources: Sequence[CacheReader]) -> None:
    fingerprints = {source.manifest.dataset.fingerprint for source in sources}
    if len(fingerprints) > 1 and sources[0].manifest.images == "reference":
        names = " and ".join(source.manifest.dataset.repo_id for source in sources)
        raise CraftError(
            "These caches point to images of different datasets.",
            why=f"their rows refer to {names}, and a cache refers to one dataset.",
            fix="build them with craft cache build --images embed, then merge.",
        )


def _short(value: Any) -> str:
    text = str(list(value)) if isinstance(value, tuple) else str(value)
    return text[:12] if len(text) > 24 else text or "unknown"
