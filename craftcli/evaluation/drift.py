"""Drift: how far a policy has moved from the teacher of a cache, over the cache's rows.

It is given by layer as nmse (squared error over the teacher's variance) and as linear centred
kernel alignment (CKA, how alike two representations are up to rotation and scale), and by mode as
the retention loss that the run was trained with.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from craftcli.cache.format import PREDICTION, Manifest
from craftcli.cache.reading.reader import CacheReader
from craftcli.choices import Kind, LossKind, Mode
from craftcli.engine.retention.anchors import AnchorBatch
from craftcli.engine.retention.imitation import Imitation
from craftcli.engine.retention.opening import OpenedAnchors, open_anchors
from craftcli.errors import CraftError
from craftcli.evaluation.results import ActionError, Drift, LayerDrift
from craftcli.policies.base import Features
from craftcli.policies.identity import common_frames
from craftcli.policies.lerobot.checkpoint import Checkpoint

_IDENTITY = ("stack", "layers", "pooling", "kinds", "dtype")


def cache_digest(manifest: Manifest) -> str:
    """A digest of a cache's content: the same for the same teacher, frames and targets."""
    parts = [str(getattr(manifest, name)) for name in _IDENTITY]
    parts += [manifest.teacher.weights_digest, manifest.dataset.fingerprint]
    parts += [manifest.dataset.selection_digest, str(manifest.prompts_digest)]
    if manifest.statistics is not None:
        parts.append(manifest.teacher.processor_digest)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@torch.no_grad()
def measure_drift(
    checkpoint: Checkpoint,
    cache: CacheReader,
    *,
    loss: LossKind = LossKind.NMSE,
    trained_on: CacheReader | None = None,
    anchor_root: str | None = None,
    batch_size: int = 32,
    on_rows: Callable[[int], None] = lambda _: None,
) -> Drift:
    """Run the policy over all rows of a cache and compare it with the teacher.

    `trained_on` is the cache that the policy was trained to hold, if any.
    """
    opened = _open(checkpoint, cache, anchor_root)
    imitation = opened.imitation([Mode(kind) for kind in cache.manifest.kinds])
    rows = np.flatnonzero(cache.read_all("valid"))
    device = next(checkpoint.policy.parameters()).device
    sums = _Sums(imitation, loss)
    for start in range(0, len(rows), batch_size):
        piece = rows[start : start + batch_size]
        batch = opened.anchors.read(piece, device)
        sums.add(imitation.features(batch), batch, len(piece))
        on_rows(len(piece))
    manifest = cache.manifest
    return Drift(
        cache=str(cache.path),
        cache_digest=cache_digest(manifest),
        teacher_digest=manifest.teacher.weights_digest,
        dataset_fingerprint=manifest.dataset.fingerprint,
        rows=len(rows),
        shared_rows=None if trained_on is None else count_shared(cache, trained_on),
        loss=loss.value,
        l_ret=sums.l_ret(),
        layers=sums.layers(),
        action=sums.action(),
    )


def count_shared(cache: CacheReader, other: CacheReader) -> int:
    """How many rows of a cache are frames that another cache holds too."""
    frames, others = (one.read_all("index/dataset_index") for one in (cache, other))
    if other.manifest.dataset.fingerprint == cache.manifest.dataset.fingerprint:
        return int(np.isin(frames, others).sum())
    # Of several datasets, one may be in both.
    return sum(
        int(np.isin(common.in_second(frames), others).sum())
        for common in common_frames(cache.manifest.parts, other.manifest.parts)
    )


class _Sums:
    """Means over rows, summed up batch by batch."""

    def __init__(self, imitation: Imitation, loss: LossKind) -> None:
        self._imitation = imitation
        self._loss = loss
        self._rows = 0
        self._l_ret: dict[Mode, float] = defaultdict(float)
        self._nmse: dict[str, float] = defaultdict(float)
        self._action = 0.0
        self._cka: dict[str, LinearCka] = defaultdict(LinearCka)

    def add(self, features: Features, batch: AnchorBatch, rows: int) -> None:
        """Add a batch of `rows` rows."""
        self._rows += rows
        for mode, found in self._imitation.compare(features, batch, self._loss).items():
            self._l_ret[mode] += rows * found.total.item()
        relative = self._imitation.compare(features, batch, LossKind.NMSE, weighted=False)
        if Mode.ACTION in relative:
            self._action += rows * relative[Mode.ACTION].total.item()
        if Mode.HIDDEN not in relative:
            return
        for layer, value in relative[Mode.HIDDEN].per_layer.items():
            self._nmse[layer] += rows * value.item()
        for layer, states in self._imitation.states(features).items():
            self._cka[layer].update(states[batch.mask], batch.targets[layer][batch.mask])

    def l_ret(self) -> dict[str, float]:
        return {mode.value: total / self._rows for mode, total in self._l_ret.items()}

    def layers(self) -> tuple[LayerDrift, ...]:
        return tuple(
            LayerDrift(layer=layer, nmse=total / self._rows, cka=self._cka[layer].value)
            for layer, total in self._nmse.items()
        )

    def action(self) -> ActionError | None:
        if Mode.ACTION not in self._l_ret:
            return None
        kind = "nmse" if PREDICTION in self._imitation.anchors.variances else "kl"
        return ActionError(kind=kind, value=self._action / self._rows, rows=self._rows)


def _open(checkpoint: Checkpoint, cache: CacheReader, anchor_root: str | None) -> OpenedAnchors:
    """A cache, opened to compare a policy with everything that it holds of its teacher."""
    teacher = cache.manifest.teacher
    if teacher.policy_type != checkpoint.policy_type:
        raise CraftError(
            f"The cache {cache.path} does not fit the policy.",
            why=f"its teacher is a {teacher.policy_type}, the policy a {checkpoint.policy_type}.",
            fix="give --cache a cache that was built from the policy's own teacher.",
        )
    kinds = [Kind(kind) for kind in cache.manifest.kinds]
    return open_anchors(cache, checkpoint, kinds=kinds, anchor_root=anchor_root)


class LinearCka:
    """Linear CKA of paired vectors, added batch by batch.

    With the vectors centred as rows of X and Y: |XᵀY|² / (|XᵀX| |YᵀY|), in Frobenius norms. It is 1
    if Y is X rotated and scaled. Sums are kept in float64, because centring subtracts numbers that
    are nearly equal. Kornblith et al., arXiv 1905.00414.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sums: dict[str, Tensor] = {}

    def update(self, ours: Tensor, theirs: Tensor) -> None:
        """Add pairs: [N, D] and [N, E]."""
        x, y = ours.detach().double().cpu(), theirs.detach().double().cpu()
        self._count += len(x)
        new = {"x": x.sum(0), "y": y.sum(0), "xx": x.T @ x, "yy": y.T @ y, "xy": x.T @ y}
        self._sums = {name: self._sums.get(name, 0) + value for name, value in new.items()}

    @property
    def value(self) -> float:
        """The alignment in 0..1; 0 if X or Y does not vary."""
        cross = self._centred_product("x", "y").square().sum()
        own = self._centred_product("x", "x").norm() * self._centred_product("y", "y").norm()
        return float(cross / own) if own > 0 else 0.0

    def _centred_product(self, a: str, b: str) -> Tensor:
        """The product of the centred vectors, from the sums."""
        sums = self._sums
        return sums[a + b] - torch.outer(sums[a], sums[b]) / self._count
