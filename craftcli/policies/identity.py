"""The identities of teacher and dataset that a cache stores, to recognise both later."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class TeacherIdentity:
    """The frozen policy that a cache was computed with."""

    source: str
    """Hub repository or folder that the teacher was loaded from."""
    revision: str | None
    """Revision requested on the Hub; null for the default one, or for a folder."""
    policy_type: str
    """LeRobot's name of the policy family, such as pi0_fast."""
    weights_digest: str
    """Digest of the weights."""
    config_digest: str
    """Digest of the policy configuration."""
    processor_digest: str
    """Digest of the processors, with their normalisation statistics."""
    dtype: str
    """Dtype in which the teacher computed."""


@dataclass(frozen=True, kw_only=True)
class DatasetIdentity:
    """The samples that the teacher was run on."""

    repo_id: str
    """Name of the LeRobot dataset."""
    root: str | None
    """Folder that it was read from."""
    revision: str | None
    """Commit or tag on the Hub; null for a local dataset."""
    fingerprint: str
    """Digest of the dataset's features and sizes, and of some of its rows."""
    episodes: int
    """Episodes in the whole dataset."""
    frames: int
    """Frames in the whole dataset."""
    selection_digest: str
    """Digest of the dataset indices that were selected as rows."""


@dataclass(frozen=True, kw_only=True)
class CommonFrames:
    """Frames that two lists of datasets have in common, because they share a dataset."""

    old: range
    """Their numbers in the first list, counted through all its datasets."""
    shift: int
    """What to add to these to get their numbers in the second list."""

    def in_second(self, frames: "NDArray[Any]") -> "NDArray[Any]":
        """The numbers in the second list of those of `frames` that both lists have."""
        found: NDArray[Any] = frames[(frames >= self.old.start) & (frames < self.old.stop)]
        return found + self.shift


def common_frames(
    old: Sequence[DatasetIdentity], new: Sequence[DatasetIdentity]
) -> list[CommonFrames]:
    """The frames of the datasets that are in both lists, dataset by dataset.

    A dataset with an unknown fingerprint counts as being in no other list.
    """
    found, first = [], 0
    for dataset in old:
        start = 0
        for other in new:
            if dataset.fingerprint and other.fingerprint == dataset.fingerprint:
                frames = range(first, first + dataset.frames)
                found.append(CommonFrames(old=frames, shift=start - first))
            start += other.frames
        first += dataset.frames
    return found
