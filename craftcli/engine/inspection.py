"""A cache beside its policy and dataset: do they still belong together, and give the same?"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from craftcli.cache.format import Manifest
from craftcli.cache.matching import (
    FieldMatch,
    match_dataset,
    match_teacher,
    not_at_hand,
    teacher_at_hand,
)
from craftcli.cache.reader import CacheReader
from craftcli.cache.recheck import RowCheck, obstacle, recheck, spread_rows
from craftcli.config import DEMO
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.datasets import OLD, ensure_dataset
from craftcli.engine.anchor_rows import AnchorRows, open_anchor_rows
from craftcli.engine.session import choose_device
from craftcli.errors import CraftError
from craftcli.policies.data import open_dataset
from craftcli.policies.identity import dataset_identity, teacher_identity
from craftcli.policies.loading import Checkpoint, load_checkpoint

# A fingerprint is of the files alone, so a dataset can be told apart without a policy to read it.
_NO_POLICY = SimpleNamespace(
    image_features={},
    input_features={},
    output_features={},
    observation_delta_indices=None,
    action_delta_indices=None,
    reward_delta_indices=None,
)


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the user holds against a cache; each may be missing."""

    policy: str | None = None
    """A checkpoint folder, a run, a Hub name, or the demo's."""
    revision: str | None = None
    dataset: str | None = None
    dataset_root: str | None = None
    dataset_revision: str | None = None
    renames: Mapping[str, str] = field(default_factory=dict)
    trust_remote_code: bool = False
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """What running the teacher again has shown, or why it was not run."""

    checks: tuple[RowCheck, ...] = ()
    not_run: str | None = None
    """The reason, when there are no checks."""


class Inspection:
    """Opens what was given, once, and holds it against the cache."""

    def __init__(self, reader: CacheReader, given: Given) -> None:
        self._reader = reader
        self._given = given
        self._teacher = self._open_policy(given.policy) if given.policy else None
        self._dataset: Any = None
        self.matches = self._match()

    @property
    def differing(self) -> list[FieldMatch]:
        """The fields that differ."""
        return [match for match in self.matches if not match.matches]

    def rerun(self, count: int) -> Rerun:
        """Run the teacher again over a few rows, if it and its inputs are at hand."""
        reason = obstacle(self._reader)
        if reason:
            return Rerun(not_run=reason)
        try:
            teacher = self._find_teacher()
            images = self._find_images(teacher)
        except _NotAtHandError as missing:
            return Rerun(not_run=str(missing))
        rows = spread_rows(self._reader, count)
        return Rerun(checks=tuple(recheck(self._reader, teacher, rows, images=images)))

    @property
    def _manifest(self) -> Manifest:
        return self._reader.manifest

    def _match(self) -> list[FieldMatch]:
        found: list[FieldMatch] = []
        if self._teacher:
            found += match_teacher(self._manifest, teacher_identity(self._teacher))
        if self._given.dataset:
            # A policy that is not the teacher need not fit the dataset, and is not asked to.
            fits = self._teacher and all(match.matches for match in found)
            config = self._teacher.policy.config if self._teacher and fits else _NO_POLICY
            self._dataset = self._open_dataset(config)
            found += match_dataset(self._manifest, dataset_identity(self._dataset, []))
        return found

    def _open_policy(self, source: str) -> Checkpoint:
        folder = str(TEACHER_FOLDER) if source == DEMO else source
        device = choose_device(self._given.device)
        return load_checkpoint(
            folder,
            device=device,
            revision=self._given.revision,
            renames=self._given.renames,
            trust_remote_code=self._given.trust_remote_code,
        )

    def _open_dataset(self, policy_config: Any) -> Any:
        given = self._given
        repo_id, root = str(given.dataset), given.dataset_root
        if repo_id == DEMO:
            repo_id, root = OLD.repo_id, str(ensure_dataset(OLD))
        return open_dataset(
            repo_id,
            root=root,
            revision=given.dataset_revision,
            policy_config=policy_config,
            renames=given.renames,
        )

    def _find_teacher(self) -> Checkpoint:
        """The teacher given, or the one the manifest names if it is still there unchanged."""
        if self._teacher:
            if any(match.field.startswith("teacher.") for match in self.differing):
                raise _NotAtHandError("--policy is not the teacher of the cache")
            return self._teacher
        source = teacher_at_hand(self._manifest)
        if source is None:
            raise _NotAtHandError(not_at_hand(self._manifest))
        try:
            teacher = self._open_policy(source)
        except CraftError as error:
            raise _NotAtHandError(f"the teacher does not open. {error.what} {error.why}") from error
        matches = match_teacher(self._manifest, teacher_identity(teacher))
        changed = [match.field for match in matches if not match.matches]
        if changed:
            raise _NotAtHandError(
                f"{self._manifest.teacher.source} is no longer the teacher of the cache "
                f"({', '.join(changed)} differ); give the teacher with --policy"
            )
        return teacher

    def _find_images(self, teacher: Checkpoint) -> AnchorRows | None:
        """Where the images are that the cache does not hold itself."""
        if self._manifest.images != "reference":
            return None
        if self._dataset is None:
            try:
                return open_anchor_rows(self._manifest.dataset, teacher, root=None)
            except CraftError as error:
                raise _NotAtHandError(f"{error.why} Give the dataset with --dataset") from error
        if any(match.field.startswith("dataset.") for match in self.differing):
            raise _NotAtHandError("the images are in the cache's dataset, and --dataset is another")
        if self._teacher is None:
            # Until now the dataset was only compared; a policy reads more of it.
            self._dataset = self._open_dataset(teacher.policy.config)
        return AnchorRows(self._dataset, teacher)


class _NotAtHandError(Exception):
    """Something that running the teacher again needs, and why it is not there."""
