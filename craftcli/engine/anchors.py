"""Anchor rows as the student meets them: the teacher's inputs and what it made of them."""

import functools
import os
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from craftcli.cache.dtypes import decode
from craftcli.cache.format import (
    LABELS,
    OUTPUT_MASK,
    PREDICTION,
    TOP_LOGPROBS,
    TOP_TOKENS,
    Manifest,
    layer_names,
)
from craftcli.cache.inputs import unpack
from craftcli.cache.reader import CacheReader
from craftcli.cache.stats import Moments, scalar_variance
from craftcli.choices import Kind
from craftcli.config import JOINED
from craftcli.engine.anchor_rows import AnchorRows
from craftcli.engine.walk import Walk
from craftcli.errors import CraftError
from craftcli.locations import Location

_INPUTS = "inputs/"
_FRAMES = "index/dataset_index"
_OUTPUTS = {
    Kind.HIDDEN: (),
    Kind.TOKEN_CE: (LABELS,),
    Kind.ACTION: (PREDICTION, TOP_TOKENS, TOP_LOGPROBS, OUTPUT_MASK),
}
_VARIANCE_ROWS = 4096
"""Rows over which the variance of predictions is taken: enough for a scale, and quickly read."""


@functools.cache
def _decoder() -> ThreadPoolExecutor:
    """One thread for all: decoders and tokenizers are not made for several at once."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="anchor-images")


# A forked process has the executor but not its thread, and would wait for ever.
os.register_at_fork(after_in_child=_decoder.cache_clear)


@dataclass(frozen=True, kw_only=True, eq=False)
class AnchorBatch:
    """Some rows of a cache."""

    inputs: dict[str, Tensor]
    """The model inputs by name, as the teacher saw them."""
    targets: dict[str, Tensor]
    """The teacher's hidden states [B, V, D] float32 by layer name."""
    mask: Tensor | None
    """[B, V] bool: which of the vectors exist; None without hidden states."""
    outputs: dict[str, Tensor]
    """The teacher's outputs by the names of their arrays."""


class AnchorSet:
    """The valid rows of a cache, drawn in an order that is a pure function of the seed."""

    def __init__(
        self,
        reader: CacheReader,
        *,
        batch_size: int,
        seed: int,
        kinds: Collection[Kind] = (Kind.HIDDEN,),
        images: AnchorRows | None = None,
    ) -> None:
        self._reader = reader
        self.batch_size = batch_size
        self._images = images
        self._ahead: dict[int, Future[AnchorBatch]] = {}
        self.walk = Walk(_usable_rows(reader, batch_size), batch_size=batch_size, seed=seed)
        names = reader.array_names()
        self._input_names = [name for name in names if name.startswith(_INPUTS)]
        self._layers = layer_names(self.manifest) if Kind.HIDDEN in kinds else []
        wanted = [name for kind in kinds for name in _OUTPUTS[kind]]
        self._output_names = [name for name in wanted if name in names]
        hidden = [f"hidden/{layer}" for layer in self._layers]
        masks = ["hidden_mask"] if self._layers else []
        self._read_names = [*self._input_names, *hidden, *masks, *self._output_names]
        self.variances = {name: self._layer_variance(name) for name in self._layers}
        if PREDICTION in self._output_names:
            self.variances[PREDICTION] = self._prediction_variance()
        flat = [name for name, variance in self.variances.items() if variance <= 0]
        if flat:
            raise CraftError(
                f"The cache {reader.path} cannot tell drift from rest.",
                why=f"what the teacher gave does not vary between its rows ({flat[0]}).",
                fix="build a cache with more --samples, or of another pooling or layer.",
            )

    @classmethod
    def open(
        cls,
        path: Location,
        *,
        batch_size: int,
        seed: int,
        kinds: Collection[Kind] = (Kind.HIDDEN,),
        images: AnchorRows | None = None,
    ) -> Self:
        """Open a cache that holds what is asked for."""
        reader = CacheReader.open(path)
        check_kinds(reader.manifest, kinds, cache=str(path))
        if kinds and reader.manifest.images == "reference" and images is None:
            raise CraftError(
                f"The cache {path} does not hold its images.",
                why=f"they stayed in the dataset {reader.manifest.dataset.repo_id}.",
                fix="open it with that dataset, or rebuild it with --images embed.",
            )
        return cls(reader, batch_size=batch_size, seed=seed, kinds=kinds, images=images)

    def __len__(self) -> int:
        return len(self.walk)

    def __repr__(self) -> str:
        return f"AnchorSet(rows={len(self)}, batch_size={self.batch_size}, {self._reader!r})"

    @property
    def manifest(self) -> Manifest:
        """What the cache says of itself."""
        return self._reader.manifest

    def frames(self, number: int) -> list[int]:
        """Where in the dataset the rows of the batch of that number came from."""
        frames: list[int] = self._reader.read(_FRAMES, self.walk.rows(number)).tolist()
        return frames

    def batch(self, number: int, device: torch.device, *, following: int = 1) -> AnchorBatch:
        """The batch of that number in an endless walk over the rows, reshuffled every round.

        While it is used, a thread decodes the images of the one `following` numbers later.
        """
        if self._reader.fetches:
            self._reader.prefetch(self.walk.rows(number), self._read_names)
            self._reader.prefetch(self.walk.rows(number + following), self._read_names)
        if self._images is None:
            return self._numbered(number, device)
        waiting = self._ahead.pop(number, None)
        batch = waiting.result() if waiting else self._numbered(number, device)
        coming = number + following
        self._ahead = {coming: _decoder().submit(self._numbered, coming, device)}
        return batch

    def _numbered(self, number: int, device: torch.device) -> AnchorBatch:
        return self.read(self.walk.rows(number), device)

    def read(self, rows: NDArray[Any], device: torch.device) -> AnchorBatch:
        """The rows given, on the device."""
        inputs = {
            name.removeprefix(_INPUTS): unpack(
                self._reader.read(name, rows), self._reader.spec(name).attributes
            ).to(device)
            for name in self._input_names
        }
        if self._images is not None:
            frames = self._reader.read(_FRAMES, rows).tolist()
            images = self._images.read_images(frames)
            inputs |= {key: image.to(device) for key, image in images.items()}
        targets = {
            layer: torch.from_numpy(
                decode(self._reader.read(f"hidden/{layer}", rows), self.manifest.dtype)
            ).to(device)
            for layer in self._layers
        }
        outputs = {name: self._tensor(name, rows, device) for name in self._output_names}
        mask = self._tensor("hidden_mask", rows, device) if self._layers else None
        return AnchorBatch(inputs=inputs, targets=targets, mask=mask, outputs=outputs)

    def _tensor(self, name: str, rows: NDArray[Any], device: torch.device) -> Tensor:
        return torch.from_numpy(self._reader.read(name, rows)).to(device)

    def _layer_variance(self, layer: str) -> float:
        stats = self._reader.stats(layer)
        return scalar_variance(stats.variance, stats.count)

    def _prediction_variance(self) -> float:
        """The mean variance of the teacher's predictions, from rows all over the cache."""
        usable = np.flatnonzero(self._reader.read_all("valid"))
        spread = np.unique(np.linspace(0, len(usable) - 1, _VARIANCE_ROWS).round().astype(int))
        values = self._reader.read(PREDICTION, usable[spread])
        moments = Moments(*values.shape[1:])
        moments.update(values, self._reader.read(OUTPUT_MASK, usable[spread]))
        return scalar_variance(moments.variance, moments.count)


def check_kinds(manifest: Manifest, kinds: Collection[Kind], *, cache: str) -> None:
    """Refuse a cache that lacks what a mode needs, with the command that builds it."""
    missing = [kind for kind in kinds if kind not in manifest.kinds]
    if missing:
        together = JOINED.join(kind for kind in Kind if kind in (*manifest.kinds, *missing))
        held = JOINED.join(kind for kind in kinds if kind in manifest.kinds)
        raise CraftError(
            f"The cache {cache} cannot serve --mode {JOINED.join(missing)}.",
            why=f"it holds {', '.join(manifest.kinds)}.",
            fix=(f"hold less with --mode {held}, or " if held else "")
            + f"build one that can: craft cache build --kind {together} --output {cache} "
            "--overwrite.",
        )


def _usable_rows(reader: CacheReader, batch_size: int) -> NDArray[np.intp]:
    rows = np.flatnonzero(reader.read_all("valid"))
    if len(rows) < batch_size:
        raise CraftError(
            f"The cache has {len(rows)} usable anchors, fewer than a batch.",
            why=f"a retention step takes {batch_size} of them.",
            fix=f"use --anchor-batch-size {max(len(rows), 1)} or build a larger cache.",
        )
    return rows
