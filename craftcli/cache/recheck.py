"""Running the teacher again over rows of a cache: does it still give what is stored?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from craftcli.cache.format import Manifest, layer_names
from craftcli.cache.reader import CacheReader
from craftcli.cache.stats import scalar_variance
from craftcli.choices import Kind, LossKind, Mode
from craftcli.engine.anchor_rows import AnchorRows
from craftcli.engine.anchors import AnchorBatch, AnchorSet
from craftcli.engine.compatibility import TOLERANCE
from craftcli.engine.imitation import Imitation
from craftcli.policies.loading import Checkpoint


@dataclass(frozen=True, kw_only=True)
class RowCheck:
    """How far what is stored of one row is from what the teacher gives now."""

    row: int
    """Row of the cache."""
    dataset_index: int
    """Index of the frame in the dataset."""
    episode: int
    frame: int
    layer: str
    """The layer that is furthest off, or `action` for the outputs."""
    drift: float
    """Its squared error in shares of its variance (nmse), or the divergence of tokens; infinite if
    it is no number."""
    tolerance: float
    """What rounding may account for."""

    @property
    def passed(self) -> bool:
        """Whether the drift is rounding."""
        return self.drift <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; a drift that is no number is null."""
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


def obstacle(reader: CacheReader) -> str | None:
    """Why rows of this cache cannot be run again, whoever the teacher is."""
    manifest = reader.manifest
    if not _comparable(manifest):
        return f"the cache holds {', '.join(manifest.kinds)}, neither hidden states nor outputs"
    if not reader.read_all("valid").any():
        return "the cache has no valid row"
    for layer in layer_names(manifest) if Mode.HIDDEN.value in manifest.kinds else ():
        stats = reader.stats(layer)
        if scalar_variance(stats.variance, stats.count) <= 0:
            return f"the states of {layer} do not vary, and drift is a share of their variance"
    return None


@torch.no_grad()
def recheck(
    reader: CacheReader,
    teacher: Checkpoint,
    rows: Sequence[int],
    *,
    images: AnchorRows | None = None,
) -> list[RowCheck]:
    """Run the teacher over the stored inputs of valid `rows`, as training runs the student.

    A cache that left its images in the dataset needs `images`.
    """
    modes = _comparable(reader.manifest)
    kinds = [Kind(mode) for mode in modes]
    anchors = AnchorSet.open(reader.path, batch_size=1, seed=0, kinds=kinds, images=images)
    adapter = teacher.for_stack(reader.manifest.stack).adapter
    term = Imitation(modes, anchors, teacher.policy, adapter, loss=LossKind.NMSE)
    device = next(teacher.policy.parameters()).device
    return [_check(reader, term, row, anchors.read(np.asarray([row]), device)) for row in rows]


def _check(reader: CacheReader, term: Imitation, row: int, batch: AnchorBatch) -> RowCheck:
    manifest = reader.manifest
    drifts: dict[str, float] = {}
    for mode, loss in term.compare(term.features(batch), batch, LossKind.NMSE).items():
        for part, value in (loss.per_layer or {mode.value: loss.total}).items():
            drifts[part] = _finite_or_infinite(value.item())
    worst = max(drifts, key=lambda part: drifts[part])
    index = {
        name: int(reader.read(f"index/{name}", np.asarray([row]))[0])
        for name in ("dataset_index", "episode", "frame")
    }
    dtypes = (manifest.dtype, manifest.teacher.dtype)
    tolerance = max(TOLERANCE.get(dtype, 1e-6) for dtype in dtypes)
    return RowCheck(row=row, layer=worst, drift=drifts[worst], tolerance=tolerance, **index)


def _comparable(manifest: Manifest) -> list[Mode]:
    """What a teacher that did not change has a loss of 0 in."""
    return [mode for mode in (Mode.HIDDEN, Mode.ACTION) if mode.value in manifest.kinds]


def _finite_or_infinite(drift: float) -> float:
    # A NaN would lose every comparison, and so hide behind a sound layer.
    return math.inf if math.isnan(drift) else drift
