"""How far a policy has moved from the teacher of a cache, on the cache's rows."""

import hashlib
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch

from craftcli.cache.format import PREDICTION, Manifest
from craftcli.cache.reader import CacheReader
from craftcli.choices import Kind, LossKind, Mode
from craftcli.engine.anchor_rows import open_anchor_rows
from craftcli.engine.anchors import AnchorBatch, AnchorSet
from craftcli.engine.compatibility import check_known
from craftcli.engine.imitation import Imitation
from craftcli.errors import CraftError
from craftcli.evaluation.cka import LinearCka
from craftcli.evaluation.findings import ActionError, Drift, LayerDrift
from craftcli.locations import Location
from craftcli.policies.base import Features
from craftcli.policies.loading import Checkpoint

_IDENTITY = ("stack", "layers", "pooling", "kinds", "dtype")


def cache_digest(manifest: Manifest) -> str:
    """A digest of what a cache holds, whoever wrote it and with which versions."""
    parts = [str(getattr(manifest, name)) for name in _IDENTITY]
    parts += [manifest.teacher.weights_digest, manifest.dataset.fingerprint]
    parts += [manifest.dataset.selection_digest, str(manifest.prompts_digest)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@torch.no_grad()
def measure_drift(
    checkpoint: Checkpoint,
    cache: Location,
    *,
    loss: LossKind = LossKind.NMSE,
    trained_on: Location | None = None,
    anchor_root: str | None = None,
    batch_size: int = 32,
    on_rows: Callable[[int], None] = lambda _: None,
) -> Drift:
    """Run the policy over all rows of a cache and compare; `trained_on` is the run's own cache."""
    reader = CacheReader.open(cache)
    imitation = _imitation(checkpoint, cache, reader.manifest, anchor_root)
    rows = np.flatnonzero(reader.read_all("valid"))
    device = next(checkpoint.policy.parameters()).device
    sums = _Sums(imitation, loss)
    for start in range(0, len(rows), batch_size):
        piece = rows[start : start + batch_size]
        batch = imitation.anchors.read(piece, device)
        sums.add(imitation.features(batch), batch, len(piece))
        on_rows(len(piece))
    manifest = reader.manifest
    return Drift(
        cache=str(cache),
        cache_digest=cache_digest(manifest),
        teacher_digest=manifest.teacher.weights_digest,
        dataset_fingerprint=manifest.dataset.fingerprint,
        rows=len(rows),
        shared_rows=None if trained_on is None else count_shared(reader, trained_on),
        loss=loss.value,
        l_ret=sums.l_ret(),
        layers=sums.layers(),
        action=sums.action(),
    )


def count_shared(reader: CacheReader, other: Location) -> int:
    """How many rows of a cache are frames that another one has too."""
    theirs = CacheReader.open(other)
    if theirs.manifest.dataset.fingerprint != reader.manifest.dataset.fingerprint:
        return 0
    frames = "index/dataset_index"
    return int(np.isin(reader.read_all(frames), theirs.read_all(frames)).sum())


class _Sums:
    """Means over rows, gathered batch by batch."""

    def __init__(self, imitation: Imitation, loss: LossKind) -> None:
        self._imitation = imitation
        self._loss = loss
        self._rows = 0
        self._l_ret: dict[Mode, float] = defaultdict(float)
        self._nmse: dict[str, float] = defaultdict(float)
        self._action = 0.0
        self._cka: dict[str, LinearCka] = defaultdict(LinearCka)

    def add(self, features: Features, batch: AnchorBatch, rows: int) -> None:
        """Add a batch of that many rows."""
        self._rows += rows
        for mode, found in self._imitation.compare(features, batch, self._loss).items():
            self._l_ret[mode] += rows * found.total.item()
        relative = self._imitation.compare(features, batch, LossKind.NMSE)
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


def _imitation(
    checkpoint: Checkpoint, cache: Location, manifest: Manifest, anchor_root: str | None
) -> Imitation:
    """The comparison of everything that a cache holds, with a policy that it can be shown to."""
    check_known(manifest, cache=str(cache))
    if manifest.teacher.policy_type != checkpoint.policy_type:
        raise CraftError(
            f"The cache {cache} does not fit the policy.",
            why=f"its teacher is a {manifest.teacher.policy_type}, the policy a "
            f"{checkpoint.policy_type}.",
            fix="give --cache one that the policy's own teacher made.",
        )
    images = None
    if manifest.images == "reference":
        images = open_anchor_rows(manifest.dataset, checkpoint, root=anchor_root)
    kinds = [Kind(kind) for kind in manifest.kinds]
    anchors = AnchorSet.open(cache, batch_size=1, seed=0, kinds=kinds, images=images)
    modes = [Mode(kind.value) for kind in kinds]
    return Imitation(modes, anchors, checkpoint.policy, checkpoint.adapter, loss=LossKind.NMSE)
