"""Checks a cache against its policy and dataset: same identity, and the same states again.

`CacheCheck` compares the identities of a policy and a dataset with the manifest, then runs the
teacher again over a few rows (`rerun_teacher`) and compares its states with the stored ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from craftcli.cache.format import Manifest, layer_names
from craftcli.cache.identity import (
    FieldMatch,
    match_dataset,
    match_teacher,
    unnamed_teacher_reason,
)
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.stats import scalar_variance
from craftcli.choices import Kind, LossKind, Mode
from craftcli.config.inspect import InspectConfig
from craftcli.demo.datasets import OLD
from craftcli.demo.defaults import is_of_demo
from craftcli.engine.retention.anchor_dataset import AnchorDataset, open_anchor_dataset
from craftcli.engine.retention.anchors import AnchorBatch
from craftcli.engine.retention.imitation import Imitation
from craftcli.engine.retention.opening import open_anchors
from craftcli.engine.retention.self_check import TOLERANCE
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.identity import dataset_identity, teacher_identity
from craftcli.policies.lerobot.several_datasets import SeveralDatasets
from craftcli.policies.lerobot.task_processors import as_the_anchors
from craftcli.sources import data_source, load_policy, open_sources, open_teacher


@dataclass(frozen=True, kw_only=True)
class RowCheck:
    """How far the stored states of one row are from those that the teacher gives now."""

    row: int
    """Row of the cache."""
    dataset_index: int
    """Index of the frame in the dataset."""
    episode: int
    frame: int
    layer: str
    """The layer with the largest drift, or `action` for the outputs."""
    drift: float
    """Its squared error over its variance (nmse), or the KL divergence of tokens; infinite if it is
    not a number."""
    tolerance: float
    """The largest drift that rounding explains."""

    @property
    def passed(self) -> bool:
        """Whether rounding explains the drift."""
        return self.drift <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """As JSON values; an infinite drift is null."""
        return {
            "row": self.row,
            "dataset_index": self.dataset_index,
            "episode": self.episode,
            "frame": self.frame,
            "layer": self.layer,
            "drift": self.drift if math.isfinite(self.drift) else None,
            "tolerance": self.tolerance,
            "passed": self.passed,
        }


def spread_rows(reader: CacheReader, count: int) -> list[int]:
    """Up to `count` valid rows, spread evenly from the first to the last."""
    valid = np.flatnonzero(reader.read_all("valid"))
    picked = np.linspace(0, len(valid) - 1, min(count, len(valid))).round().astype(int)
    return [int(row) for row in valid[picked]]


def rerun_obstacle(reader: CacheReader) -> str | None:
    """Why no teacher can be run again over this cache; None if one can."""
    manifest = reader.manifest
    if not _comparable_modes(manifest):
        return f"the cache holds {', '.join(manifest.kinds)}, neither hidden states nor outputs"
    if not reader.read_all("valid").any():
        return "the cache has no valid row"
    for layer in layer_names(manifest) if Mode.HIDDEN.value in manifest.kinds else ():
        stats = reader.stats(layer)
        if scalar_variance(stats.variance, stats.count) <= 0:
            return f"the states of {layer} do not vary, and drift is a share of their variance"
    return None


@torch.no_grad()
def rerun_teacher(
    reader: CacheReader,
    teacher: Checkpoint,
    rows: Sequence[int],
    *,
    dataset: AnchorDataset | None = None,
) -> list[RowCheck]:
    """Run the teacher over the stored inputs of valid `rows`, as training runs the student.

    `dataset` holds the images that the cache does not; without it, the manifest's is opened.
    """
    modes = _comparable_modes(reader.manifest)
    opened = open_anchors(reader, teacher, kinds=[Kind(mode) for mode in modes], dataset=dataset)
    imitation = opened.imitation(modes)
    device = next(teacher.policy.parameters()).device
    checks = []
    for row in rows:
        batch = opened.anchors.read(np.asarray([row]), device)
        checks.append(_check_row(reader, imitation, row, batch))
    return checks


def _check_row(reader: CacheReader, imitation: Imitation, row: int, batch: AnchorBatch) -> RowCheck:
    manifest = reader.manifest
    drifts: dict[str, float] = {}
    found = imitation.compare(imitation.features(batch), batch, LossKind.NMSE, weighted=False)
    for mode, loss in found.items():
        for part, value in (loss.per_layer or {mode.value: loss.total}).items():
            drifts[part] = _nan_to_infinity(value.item())
    worst = max(drifts, key=lambda part: drifts[part])
    index = {
        name: int(reader.read(f"index/{name}", np.asarray([row]))[0])
        for name in ("dataset_index", "episode", "frame")
    }
    dtypes = (manifest.dtype, manifest.teacher.dtype)
    tolerance = max(TOLERANCE.get(dtype, 1e-6) for dtype in dtypes)
    return RowCheck(row=row, layer=worst, drift=drifts[worst], tolerance=tolerance, **index)


def _comparable_modes(manifest: Manifest) -> list[Mode]:
    """The modes of the cache in which an unchanged teacher has a loss of 0."""
    return [mode for mode in (Mode.HIDDEN, Mode.ACTION) if mode.value in manifest.kinds]


def _nan_to_infinity(drift: float) -> float:
    # A NaN loses every comparison, so that max() would pass over it.
    return math.inf if math.isnan(drift) else drift


_NO_POLICY = SimpleNamespace(
    image_features={},
    input_features={},
    output_features={},
    observation_delta_indices=None,
    action_delta_indices=None,
    reward_delta_indices=None,
)
"""A policy configuration that reads no feature, to open a dataset for its fingerprint alone."""


@dataclass(frozen=True, kw_only=True)
class RerunResult:
    """The rows over which the teacher was run again, or why it was not run."""

    checks: tuple[RowCheck, ...] = ()
    not_run: str | None = None
    """The reason, if there are no checks."""
    changed: bool = False
    """Whether the reason is that the teacher or the dataset is no longer what it was."""


class CacheCheck:
    """Opens the policy and the dataset once, and compares them with the cache."""

    def __init__(self, reader: CacheReader, config: InspectConfig) -> None:
        self._reader = reader
        self._config = config
        self._policy = self._load_policy(config.policy) if config.policy else None
        self._dataset: Any = None
        self.matches = self._match()

    @property
    def differing(self) -> list[FieldMatch]:
        """The fields of the identities that differ."""
        return [match for match in self.matches if not match.matches]

    def rerun(self, count: int) -> RerunResult:
        """Run the teacher again over `count` rows, if it and its inputs can be opened."""
        reason = rerun_obstacle(self._reader)
        if reason:
            return RerunResult(not_run=reason)
        try:
            teacher = self._find_teacher()
            dataset = self._find_image_dataset(teacher)
        except _CannotRerunError as missing:
            return RerunResult(not_run=str(missing), changed=isinstance(missing, _ChangedError))
        rows = spread_rows(self._reader, count)
        return RerunResult(
            checks=tuple(rerun_teacher(self._reader, teacher, rows, dataset=dataset))
        )

    @property
    def _manifest(self) -> Manifest:
        return self._reader.manifest

    def _match(self) -> list[FieldMatch]:
        matches: list[FieldMatch] = []
        if self._policy:
            matches += match_teacher(self._manifest, teacher_identity(self._policy))
        if self._config.dataset:
            # Another policy than the teacher may not fit the dataset; that must not fail here.
            is_teacher = self._policy and all(match.matches for match in matches)
            self._dataset = self._open_dataset(self._policy if is_teacher else None)
            matches += match_dataset(self._manifest, dataset_identity(self._dataset, []))
        return matches

    def _load_policy(self, policy: str) -> Checkpoint:
        loaded = load_policy(
            policy,
            device=self._config.device or "auto",
            revision=self._config.revision,
            renames=self._config.renames,
            trust_remote_code=self._config.trust_remote_code,
        )
        return as_the_anchors(loaded, self._manifest.statistics)

    def _open_dataset(self, policy: Checkpoint | None) -> Any:
        config = self._config
        sources = [
            data_source(
                entry.name, root=config.dataset_root, revision=config.dataset_revision, demo=OLD
            )
            for entry in config.datasets
        ]
        if policy:
            return open_sources(sources, config.datasets, policy)
        opened = [source.open(_NO_POLICY, config.renames) for source in sources]
        weights = [entry.weight for entry in config.datasets]
        several = len(opened) > 1
        return (
            SeveralDatasets(opened, weights=weights, renames=config.renames)
            if several
            else opened[0]
        )

    def _find_teacher(self) -> Checkpoint:
        """The policy if it is the teacher, or else the demo's teacher."""
        if self._policy:
            if any(match.field.startswith("teacher.") for match in self.differing):
                raise _CannotRerunError("--policy is not the teacher of the cache")
            return self._policy
        if not is_of_demo(self._manifest.teacher.policy_type):
            raise _CannotRerunError(unnamed_teacher_reason(self._manifest))
        try:
            return open_teacher(
                self._manifest,
                device=self._config.device or "auto",
                renames=self._config.renames,
                trust_remote_code=self._config.trust_remote_code,
            )
        except CraftError as error:
            raise _ChangedError(
                f"{error.what} {error.why} Give the teacher with --policy"
            ) from error

    def _find_image_dataset(self, teacher: Checkpoint) -> AnchorDataset | None:
        """The dataset with the images, if the cache does not hold them itself."""
        if self._manifest.images != "reference":
            return None
        if self._dataset is None:
            try:
                return open_anchor_dataset(self._manifest.parts, teacher, root=None)
            except CraftError as error:
                failed = error.exit_code == EXIT_CHECK_FAILED
                reason = f"{error.why} Give the dataset with --dataset"
                raise (_ChangedError if failed else _CannotRerunError)(reason) from error
        if any(match.field.startswith("dataset.") for match in self.differing):
            raise _CannotRerunError(
                "the images are in the dataset of the cache, and --dataset is another"
            )
        if self._policy is None:
            # It was opened without a policy's features, for its identity alone.
            self._dataset = self._open_dataset(teacher)
        return AnchorDataset(self._dataset, teacher)


class _CannotRerunError(Exception):
    """Why the teacher cannot be run again."""


class _ChangedError(_CannotRerunError):
    """The teacher or the dataset is there, and it is not the one that the cache was built with."""
