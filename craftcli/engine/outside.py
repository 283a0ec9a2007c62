"""What lies outside a run and must not change while it is resumed, and what its digests cover.

Light, because `craft inspect` needs it too; `dependencies` finds what an opened run depends on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from craftcli.engine.file_digests import (
    PARTS,
    WHOLE_BYTES,
    differences,
    digest_contents,
    file_digest,
    read_in_parts,
)
from craftcli.engine.outside_files import dataset_files, policy_files

CACHE = "cache"
DATASET = "dataset"
"""The second of several datasets is dataset.2, and so on."""
LORA_BASE = "lora_base"
WEIGHTS_FILE = "model.safetensors"

_SPOKEN = {
    CACHE: "the cache",
    DATASET: "the dataset",
    LORA_BASE: "the policy under the LoRA weights",
}
_EARLIER = {
    DATASET: "8 rows of it, not the others, and no videos",
    LORA_BASE: "its weights, not its settings and processors",
}
"""What the digests of earlier versions cover."""
_SHOWN = 3
"""Changed files that a message names."""


@dataclass(frozen=True, kw_only=True)
class Dependency:
    """Something outside the run that a resumed run needs unchanged."""

    name: str
    """Name or URL, as in the settings of the run."""
    folder: str | None
    """The folder in which it was, if it is a local one."""
    digest: str
    """Of a cache, its rows; of a dataset, some of its rows; of a policy, its weights."""
    files: Mapping[str, str] | None = None
    """The digest of every file that is read, by its path in the folder; None for a cache, and in
    earlier versions."""

    def changes(self, now: "Dependency") -> str | None:
        """What has changed, in words: empty if that is not known; None if nothing has."""
        if self.files is None or now.files is None:
            return None if self.digest == now.digest else ""
        return changed_files(self.files, now.files) or None


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which files differ, in words; empty if none does."""
    found = differences(before, now)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{', '.join(found[:_SHOWN])}{more}"


def digest_dataset(root: Path, before: Mapping[str, str] | None) -> dict[str, str]:
    """The digests of all that a training reads of a dataset.

    `before` are earlier digests of it: large files are read as they were for those.
    """
    return digest_contents(dataset_files(root), before, whole_bytes=WHOLE_BYTES)


def digest_policy(folder: Path, before: Mapping[str, str] | None) -> dict[str, str]:
    """The digests of a policy's files, all of them read whole: single bytes of weights matter.

    `before` are earlier digests of it: files that came later were never part of it.
    """
    files = policy_files(folder)
    known = files if before is None else {name: files[name] for name in before if name in files}
    return digest_contents(known)


def changed_base(before: Dependency, folder: Path) -> str | None:
    """What has changed of the policy under LoRA weights, which is in `folder` now.

    None if nothing has; empty if an earlier version saved no digests that would tell.
    """
    if before.files is not None:
        return changed_files(before.files, digest_policy(folder, before.files)) or None
    return None if file_digest(folder / WEIGHTS_FILE) == before.digest else ""


def uncovered(kind: str, found: Dependency) -> str | None:
    """What of a dependency its digests do not cover, in words; None if they cover all of it."""
    if found.files is None:
        covered = _EARLIER.get(_plain(kind))
        return covered and f"an earlier version of craft compared only {covered}"
    parts = read_in_parts(found.files)
    if not parts:
        return None
    return (
        f"it is large: of {len(parts)} of its {len(found.files)} files only the size and {PARTS} "
        "parts of 1 MiB are compared"
    )


def spoken_kind(kind: str) -> str:
    """A kind of dependency in words."""
    return _SPOKEN.get(_plain(kind), kind)


def _plain(kind: str) -> str:
    return kind.partition(".")[0]
