"""Anchor rows as the student meets them: the teacher's inputs and what it made of them."""

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from craftcli.cache.dtypes import decode
from craftcli.cache.format import Manifest, layer_names
from craftcli.cache.inputs import unpack
from craftcli.cache.reader import CacheReader
from craftcli.cache.stats import scalar_variance
from craftcli.engine.reference_images import ReferenceImages
from craftcli.errors import CraftError

_INPUTS = "inputs/"


@functools.cache
def _decoder() -> ThreadPoolExecutor:
    """One thread for all: decoders and tokenizers are not made for several at once."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="anchor-images")


@dataclass(frozen=True, kw_only=True, eq=False)
class AnchorBatch:
    """Some rows of a cache."""

    inputs: dict[str, Tensor]
    """The model inputs by name, as the teacher saw them."""
    targets: dict[str, Tensor]
    """The teacher's hidden states [B, V, D] float32 by layer name."""
    mask: Tensor
    """[B, V] bool: which of the vectors exist."""


class AnchorSet:
    """The valid rows of a cache, drawn in an order that is a pure function of the seed."""

    def __init__(
        self,
        reader: CacheReader,
        *,
        batch_size: int,
        seed: int,
        images: ReferenceImages | None = None,
    ) -> None:
        if reader.manifest.images == "reference" and images is None:
            raise CraftError(
                f"The cache {reader.path} does not hold its images.",
                why=f"they stayed in the dataset {reader.manifest.dataset.repo_id}.",
                fix="open it with that dataset, or rebuild it with --images embed.",
            )
        self._reader = reader
        self._batch_size = batch_size
        self._seed = seed
        self._images = images
        self._ahead: dict[int, Future[AnchorBatch]] = {}
        self._rows = np.flatnonzero(reader.read_all("valid"))
        self._input_names = [n for n in reader.array_names() if n.startswith(_INPUTS)]
        if len(self._rows) < batch_size:
            raise CraftError(
                f"The cache has {len(self._rows)} usable anchors, fewer than a batch.",
                why=f"a retention step takes {batch_size} of them.",
                fix=f"use --anchor-batch-size {max(len(self._rows), 1)} or build a larger cache.",
            )
        self.variances = self._read_variances()

    @classmethod
    def open(
        cls, path: Path, *, batch_size: int, seed: int, images: ReferenceImages | None = None
    ) -> Self:
        """Open a cache that holds hidden states."""
        reader = CacheReader.open(path)
        if "hidden" not in reader.manifest.kinds:
            raise CraftError(
                f"The cache {path} cannot serve --mode hidden.",
                why=f"it holds {', '.join(reader.manifest.kinds)}.",
                fix="build one with craft cache build.",
            )
        return cls(reader, batch_size=batch_size, seed=seed, images=images)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"AnchorSet(rows={len(self)}, batch_size={self._batch_size}, {self._reader!r})"

    @property
    def manifest(self) -> Manifest:
        """What the cache says of itself."""
        return self._reader.manifest

    def batch(self, number: int, device: torch.device) -> AnchorBatch:
        """The batch of that number in an endless walk over the rows, reshuffled every round.

        While it is used, a thread decodes the images of the next.
        """
        if self._images is None:
            return self._numbered(number, device)
        waiting = self._ahead.pop(number, None)
        batch = waiting.result() if waiting else self._numbered(number, device)
        self._ahead = {number + 1: _decoder().submit(self._numbered, number + 1, device)}
        return batch

    def _numbered(self, number: int, device: torch.device) -> AnchorBatch:
        return self.read(self._rows[self._positions(number)], device)

    def read(self, rows: NDArray[Any], device: torch.device) -> AnchorBatch:
        """The rows given, on the device."""
        inputs = {
            name.removeprefix(_INPUTS): unpack(
                self._reader.read(name, rows), self._reader.spec(name).attributes
            ).to(device)
            for name in self._input_names
        }
        if self._images is not None:
            frames = self._reader.read("index/dataset_index", rows).tolist()
            images = self._images.read(frames)
            inputs |= {key: image.to(device) for key, image in images.items()}
        targets = {
            layer: torch.from_numpy(
                decode(self._reader.read(f"hidden/{layer}", rows), self.manifest.dtype)
            ).to(device)
            for layer in layer_names(self.manifest)
        }
        mask = torch.from_numpy(self._reader.read("hidden_mask", rows)).to(device)
        return AnchorBatch(inputs=inputs, targets=targets, mask=mask)

    def _positions(self, number: int) -> NDArray[Any]:
        walked = np.arange(number * self._batch_size, (number + 1) * self._batch_size)
        rounds, offsets = np.divmod(walked, len(self._rows))
        orders = {
            int(r): np.random.default_rng([self._seed, int(r)]).permutation(len(self._rows))
            for r in np.unique(rounds)
        }
        return np.array([orders[int(r)][o] for r, o in zip(rounds, offsets, strict=True)])

    def _read_variances(self) -> dict[str, float]:
        stats = {layer: self._reader.stats(layer) for layer in layer_names(self.manifest)}
        variances = {layer: scalar_variance(s.variance, s.count) for layer, s in stats.items()}
        flat = [layer for layer, variance in variances.items() if variance <= 0]
        if flat:
            raise CraftError(
                f"The cache {self._reader.path} cannot tell drift from rest.",
                why=f"the teacher's states do not vary between its rows (layer {flat[0]}).",
                fix="build a cache with more --samples, or of another pooling or layer.",
            )
        return variances
