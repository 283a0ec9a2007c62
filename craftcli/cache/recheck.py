"""Running the teacher again over rows of a cache: does it still give what is stored?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from craftcli.cache.format import layer_names
from craftcli.cache.reader import CacheReader
from craftcli.cache.stats import scalar_variance
from craftcli.choices import LossKind, Mode
from craftcli.engine.anchor_rows import AnchorRows
from craftcli.engine.anchors import AnchorBatch, AnchorSet
from craftcli.engine.compatibility import TOLERANCE
from craftcli.engine.imitation import Imitation
from craftcli.engine.losses import layer_loss
from craftcli.policies.loading import Checkpoint

BATCH_ROWS = 8
"""Rows the teacher sees at once: few enough for any machine that could build the cache."""


@dataclass(frozen=True, kw_only=True)
class RowCheck:
    """How far one row's stored states are from what the teacher gives now."""

    row: int
    """Row of the cache."""
    dataset_index: int
    """Index of the frame in the dataset."""
    episode: int
    frame: int
    layer: str
    """The layer that is furthest off."""
    drift: float
    """Its squared error in shares of the layer's variance (nmse); infinite if it is no number."""
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
    if "hidden" not in manifest.kinds:
        return f"the cache holds {', '.join(manifest.kinds)} and no hidden states"
    if not reader.read_all("valid").any():
        return "the cache has no valid row"
    for layer in layer_names(manifest):
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
    anchors = AnchorSet.open(reader.path, batch_size=1, seed=0, images=images)
    adapter = teacher.for_stack(reader.manifest.stack).adapter
    term = Imitation([Mode.HIDDEN], anchors, teacher.policy, adapter, loss=LossKind.NMSE)
    device = next(teacher.policy.parameters()).device
    checks: list[RowCheck] = []
    for start in range(0, len(rows), BATCH_ROWS):
        some = np.asarray(rows[start : start + BATCH_ROWS])
        batch = anchors.read(some, device)
        checks += _compare(
            reader, some, batch, term.states(term.features(batch)), anchors.variances
        )
    return checks


def _compare(
    reader: CacheReader,
    rows: Any,
    batch: AnchorBatch,
    states: dict[str, torch.Tensor],
    variances: dict[str, float],
) -> list[RowCheck]:
    manifest = reader.manifest
    tolerance = max(
        TOLERANCE.get(dtype, 1e-6) for dtype in (manifest.dtype, manifest.teacher.dtype)
    )
    index = {
        name: reader.read(f"index/{name}", rows) for name in ("dataset_index", "episode", "frame")
    }
    checks = []
    device = next(iter(states.values())).device
    mask = torch.from_numpy(reader.read("hidden_mask", rows)).to(device)
    for at, row in enumerate(rows):
        one = slice(at, at + 1)
        drifts = {
            layer: _finite_or_infinite(
                layer_loss(
                    now[one],
                    batch.targets[layer][one],
                    mask[one],
                    LossKind.NMSE,
                    variances[layer],
                ).item()
            )
            for layer, now in states.items()
        }
        worst = max(drifts, key=lambda layer: drifts[layer])
        checks.append(
            RowCheck(
                row=int(row),
                layer=worst,
                drift=drifts[worst],
                tolerance=tolerance,
                **{name: int(values[at]) for name, values in index.items()},
            )
        )
    return checks


def _finite_or_infinite(drift: float) -> float:
    # A NaN would lose every comparison, and so hide behind a sound layer.
    return math.inf if math.isnan(drift) else drift
