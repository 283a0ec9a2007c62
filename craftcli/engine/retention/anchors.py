"""Batches of anchors: the teacher's inputs and results, in an order that only the seed decides."""

import functools
import os
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

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
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.stats import Moments, scalar_variance
from craftcli.cache.variations import read_variations
from craftcli.choices import Kind
from craftcli.config.parsing import JOINED
from craftcli.engine.retention.anchor_dataset import AnchorDataset
from craftcli.engine.retention.held_out_rows import split_rows
from craftcli.engine.retention.task_variances import rows_by_task, spread, within_tasks
from craftcli.engine.transfers import to_device
from craftcli.errors import CraftError

_INPUTS = "inputs/"
_FRAMES = "index/dataset_index"
_OUTPUTS = {
    Kind.HIDDEN: (),
    Kind.TOKEN_CE: (LABELS,),
    Kind.ACTION: (PREDICTION, TOP_TOKENS, TOP_LOGPROBS, OUTPUT_MASK),
}
AHEAD = 4
"""Batches that a thread prepares in advance: one that takes long then delays no step."""
_MASK = "hidden_mask"


@functools.cache
def _decoder() -> ThreadPoolExecutor:
    """One thread for all anchor sets: decoders and tokenizers do not support several."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="anchor-images")


if hasattr(os, "register_at_fork"):  # Windows has no fork
    # A forked process inherits the executor without its thread, and would wait forever.
    os.register_at_fork(after_in_child=_decoder.cache_clear)


@dataclass(frozen=True, kw_only=True, eq=False)
class AnchorBatch:
    """Some rows of a cache, on one device."""

    inputs: dict[str, Tensor]
    """The model inputs by name, as the teacher got them."""
    targets: dict[str, Tensor]
    """The teacher's hidden states [B, V, D] float32 by layer name."""
    mask: Tensor | None
    """[B, V] bool: which vectors exist; None without hidden states."""
    outputs: dict[str, Tensor]
    """The teacher's outputs by array name."""
    variances: dict[str, Tensor]
    """[B] float32: what nmse is a share of, by layer and output."""

    def first(self, rows: int) -> Self:
        """The first rows of the batch."""
        return replace(
            self,
            inputs={name: values[:rows] for name, values in self.inputs.items()},
            targets={name: values[:rows] for name, values in self.targets.items()},
            mask=None if self.mask is None else self.mask[:rows],
            outputs={name: values[:rows] for name, values in self.outputs.items()},
            variances={name: values[:rows] for name, values in self.variances.items()},
        )


class NumberedAnchors(Protocol):
    """Anchors as an endless row of numbered batches: the same number is always the same batch."""

    batch_size: int
    waited_s: float
    """How long `batch` has kept its callers waiting for inputs, all calls together."""

    def __len__(self) -> int: ...

    @property
    def variances(self) -> Mapping[str, float]:
        """The teacher's variance by layer and output, over all anchors together."""
        ...

    @property
    def held_out(self) -> "Walk | None":
        """The anchors that are not trained on, if any."""
        ...

    @property
    def manifest(self) -> Manifest:
        """What the teacher was asked for, and on what."""
        ...

    def batch(self, number: int, device: torch.device, *, following: int = 1) -> AnchorBatch:
        """The batch with this number; the next one to be asked for is `number + following`."""
        ...

    def held_out_batch(self, number: int, device: torch.device) -> AnchorBatch:
        """The batch with this number of the anchors that are not trained on."""
        ...

    def instructions(self) -> list[tuple[int, str]]:
        """Frames of the dataset, and the instructions that anchors show them under."""
        ...


class AnchorSet:
    """The valid rows of a cache, as numbered batches.

    `kinds` are the teacher's results to read: the cache must hold them. A cache that keeps its
    images in the dataset needs `images` to read them from. With a `held_out_share`, that share of
    the rows is in the batches of `held_out_batch` and in no other.
    """

    def __init__(
        self,
        reader: CacheReader,
        *,
        batch_size: int,
        seed: int,
        kinds: Collection[Kind] = (Kind.HIDDEN,),
        images: AnchorDataset | None = None,
        held_out_share: float = 0.0,
    ) -> None:
        _check_kinds(reader, kinds)
        if kinds and reader.manifest.images == "reference" and images is None:
            raise CraftError(
                f"The cache {reader.path} does not hold its images.",
                why=f"they are in the dataset {reader.manifest.dataset.repo_id}.",
                fix="open it with that dataset, or rebuild it with --images embed.",
            )
        self.reader = reader
        self.batch_size = batch_size
        self.waited_s = 0.0
        self._images = images
        self._prepared: dict[int, Future[AnchorBatch]] = {}
        self.walk, self.held_out = _walks(
            reader, batch_size=batch_size, seed=seed, held_out_share=held_out_share
        )
        names = reader.array_names()
        self._input_names = [name for name in names if name.startswith(_INPUTS)]
        self._layers = layer_names(self.manifest) if Kind.HIDDEN in kinds else []
        outputs = [name for kind in kinds for name in _OUTPUTS[kind]]
        self._output_names = [name for name in outputs if name in names]
        hidden = [f"hidden/{layer}" for layer in self._layers]
        masks = [_MASK] if self._layers else []
        self._read_names = [*self._input_names, *hidden, *masks, *self._output_names]
        variances = {name: self._layer_variance(name) for name in self._layers}
        if PREDICTION in self._output_names:
            variances[PREDICTION] = self._prediction_variance()
        flat = [name for name, variance in variances.items() if variance <= 0]
        if flat:
            raise CraftError(
                f"The cache {reader.path} cannot be normalised.",
                why=f"{flat[0]} has zero variance over its rows.",
                fix="build a cache with more --samples, or with another pooling or layer.",
            )
        self.variances: Mapping[str, float] = variances
        self._row_variances = self._within_tasks()

    def __len__(self) -> int:
        return len(self.walk)

    def __repr__(self) -> str:
        return f"AnchorSet(rows={len(self)}, batch_size={self.batch_size}, {self.reader!r})"

    @property
    def manifest(self) -> Manifest:
        """The manifest of the cache."""
        return self.reader.manifest

    def frames(self, number: int) -> list[int]:
        """The frames of the dataset that the rows of a numbered batch were taken from."""
        frames: list[int] = self.reader.read(_FRAMES, self.walk.rows(number)).tolist()
        return frames

    def held_out_frames(self, number: int) -> list[int]:
        """The frames of the dataset of a numbered batch of held-out anchors."""
        frames: list[int] = self.reader.read(_FRAMES, self._held_out_rows(number)).tolist()
        return frames

    def held_out_batch(self, number: int, device: torch.device) -> AnchorBatch:
        """The batch with this number in an endless walk over the held-out anchors."""
        return self.read(self._held_out_rows(number), device)

    def _held_out_rows(self, number: int) -> NDArray[np.intp]:
        if self.held_out is None:
            raise RuntimeError("the anchors were opened without held-out ones")
        return self.held_out.rows(number)

    def instructions(self) -> list[tuple[int, str]]:
        """For every row of the cache, its frame in the dataset and the instruction it is under."""
        frames, tasks = self.reader.read_all(_FRAMES), self.reader.read_all("index/task")
        names = self.reader.tasks
        return [(int(f), names[int(t)]) for f, t in zip(frames, tasks, strict=True)]

    def batch(self, number: int, device: torch.device, *, following: int = 1) -> AnchorBatch:
        """The batch with this number in an endless walk over the rows, reshuffled every round.

        Meanwhile a thread prepares the next batches, each `following` after the one before.
        """
        started = time.perf_counter()
        if self.reader.fetches:
            self.reader.prefetch(self.walk.rows(number), self._read_names)
            self.reader.prefetch(self.walk.rows(number + following), self._read_names)
        prepared = self._prepared.pop(number, None)
        batch = prepared.result() if prepared else self._numbered(number, device)
        if self._images is not None:
            self._prepare([number + following * n for n in range(1, AHEAD + 1)], device)
        self.waited_s += time.perf_counter() - started
        return batch

    def _prepare(self, numbers: list[int], device: torch.device) -> None:
        """Let a thread prepare these batches, in this order, and drop all others."""
        for number in self._prepared.keys() - set(numbers):
            self._prepared.pop(number).cancel()
        for number in numbers:
            if number not in self._prepared:
                self._prepared[number] = _decoder().submit(self._numbered, number, device)

    def _numbered(self, number: int, device: torch.device) -> AnchorBatch:
        return self.read(self.walk.rows(number), device)

    def read(self, rows: NDArray[Any], device: torch.device) -> AnchorBatch:
        """These rows of the cache, on the device."""
        inputs = {
            name.removeprefix(_INPUTS): to_device(
                unpack(self.reader.read(name, rows), self.reader.spec(name).attributes), device
            )
            for name in self._input_names
        }
        if self._images is not None:
            frames = self.reader.read(_FRAMES, rows).tolist()
            images = self._images.read_images(frames, read_variations(self.reader, rows))
            inputs |= {key: to_device(image, device) for key, image in images.items()}
        targets = {
            layer: to_device(torch.from_numpy(self._states(layer, rows)), device)
            for layer in self._layers
        }
        outputs = {name: self._tensor(name, rows, device) for name in self._output_names}
        mask = self._tensor(_MASK, rows, device) if self._layers else None
        variances = {
            name: to_device(torch.from_numpy(values[rows]), device)
            for name, values in self._row_variances.items()
        }
        return AnchorBatch(
            inputs=inputs, targets=targets, mask=mask, outputs=outputs, variances=variances
        )

    def _states(self, layer: str, rows: NDArray[Any]) -> NDArray[np.float32]:
        return decode(self.reader.read(f"hidden/{layer}", rows), self.manifest.dtype)

    def _tensor(self, name: str, rows: NDArray[Any], device: torch.device) -> Tensor:
        return to_device(torch.from_numpy(self.reader.read(name, rows)), device)

    def _within_tasks(self) -> dict[str, NDArray[np.float32]]:
        """By layer and output, the variance that each row of the cache is a share of."""
        tasks = self.reader.read_all("index/task").astype(np.intp)
        groups = rows_by_task(tasks, np.flatnonzero(self.reader.read_all("valid")))
        found = {}
        for name, whole in self.variances.items():
            moments = {
                task: self._moments(name, rows, groups=len(groups)) for task, rows in groups.items()
            }
            own = within_tasks(moments, whole)
            found[name] = np.array([own.get(task, whole) for task in tasks.tolist()], np.float32)
        return found

    def _moments(self, name: str, rows: NDArray[np.intp], *, groups: int = 1) -> Moments:
        """The moments of a layer or of the predictions over rows; there are so many groups."""
        is_prediction = name == PREDICTION
        array = PREDICTION if is_prediction else f"hidden/{name}"
        rows = spread(rows, self.reader.spec(array).row_bytes, groups=groups)
        values = self.reader.read(PREDICTION, rows) if is_prediction else self._states(name, rows)
        moments = Moments(*values.shape[1:])
        moments.update(values, self.reader.read(OUTPUT_MASK if is_prediction else _MASK, rows))
        return moments

    def _layer_variance(self, layer: str) -> float:
        stats = self.reader.stats(layer)
        return scalar_variance(stats.variance, stats.count)

    def _prediction_variance(self) -> float:
        """The mean variance of the teacher's predictions, from rows spread over the cache."""
        moments = self._moments(PREDICTION, np.flatnonzero(self.reader.read_all("valid")))
        return scalar_variance(moments.variance, moments.count)


def _check_kinds(reader: CacheReader, kinds: Collection[Kind]) -> None:
    """Refuse a cache that lacks a kind, with the command that builds a suitable one."""
    manifest, cache = reader.manifest, str(reader.path)
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


def _walks(
    reader: CacheReader, *, batch_size: int, seed: int, held_out_share: float
) -> tuple["Walk", "Walk | None"]:
    """The walks over the anchors that are trained on and over those that are held out, if any."""
    rows = _usable_rows(reader, batch_size)
    if not held_out_share:
        return Walk(rows, batch_size=batch_size, seed=seed), None
    split = split_rows(reader, rows, share=held_out_share, seed=seed)
    _require_batch(len(split.trained), batch_size)
    held_out_size = min(batch_size, len(split.held_out))
    return (
        Walk(split.trained, batch_size=batch_size, seed=seed),
        Walk(split.held_out, batch_size=held_out_size, seed=seed),
    )


def _usable_rows(reader: CacheReader, batch_size: int) -> NDArray[np.intp]:
    rows = np.flatnonzero(reader.read_all("valid"))
    _require_batch(len(rows), batch_size)
    return rows


def _require_batch(rows: int, batch_size: int) -> None:
    if rows < batch_size:
        raise CraftError(
            f"The cache has {rows} usable anchors, fewer than a batch.",
            why=f"a retention step uses {batch_size} of them.",
            fix=f"use --anchor-batch-size {max(rows, 1)}, or build a larger cache.",
        )


class Walk:
    """An endless, numbered walk over rows: the same seed and number always give the same rows.

    Every round shows each row once, in an order of its own.
    """

    def __init__(self, rows: NDArray[np.intp], *, batch_size: int, seed: int) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._orders: dict[int, NDArray[np.intp]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, number: int) -> NDArray[np.intp]:
        """The rows of the batch with this number."""
        walked = np.arange(number * self._batch_size, (number + 1) * self._batch_size)
        rounds, offsets = np.divmod(walked, len(self._rows))
        needed = [int(r) for r in np.unique(rounds)]
        # Kept from one batch to the next: shuffling a million rows takes 20 ms.
        self._orders = {
            r: self._orders[r] if r in self._orders else self._shuffle(r) for r in needed
        }
        picked = [self._orders[int(r)][o] for r, o in zip(rounds, offsets, strict=True)]
        rows: NDArray[np.intp] = self._rows[np.array(picked)]
        return rows

    def _shuffle(self, number: int) -> NDArray[np.intp]:
        """The order of a round."""
        return np.random.default_rng([self._seed, number]).permutation(len(self._rows))
