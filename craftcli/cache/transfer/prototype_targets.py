"""Turns what the prototypes stored of their teacher into arrays of the cache format."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.dtypes import is_finite
from craftcli.cache.format import DTYPES, LABELS
from craftcli.cache.layers import resolve_layers
from craftcli.cache.storage.chunks import ArraySpec, RowArrays
from craftcli.cache.transfer.prototype_files import Prototype, Shard, read_field
from craftcli.choices import IGNORED_LABEL
from craftcli.errors import CraftError

if TYPE_CHECKING:
    from torch import Tensor

_STACK = "vlm"
_UNKNOWN = "unknown"
_TWO_VECTORS = "vision_text"
_AXES = {"target_features": 2, "teacher_hidden": 4, "labels": 2}


@dataclass(frozen=True, kw_only=True)
class PrototypeTargets:
    """The targets of a prototype's folder in the terms of a manifest."""

    name: str
    """Their name in the shards."""
    kind: str
    layers: tuple[int, ...]
    layer_count: int
    layers_known: bool
    """Whether the prototype recorded which layers they are."""
    pooling: str
    vectors: int
    dim: int
    dtype: str
    specs: dict[str, ArraySpec] = field(default_factory=dict)
    """Arrays besides those that the manifest requires."""
    stack: str = _STACK

    def convert(self, shard: Shard) -> tuple[RowArrays, NDArray[np.bool_]]:
        """The arrays of a shard's targets, and which of its rows are usable."""
        if self.kind == "token_ce":
            labels = shard.tensors[self.name].numpy()
            return {LABELS: labels}, np.asarray((labels != IGNORED_LABEL).any(axis=1))
        stored = self._stored(shard.tensors[self.name])
        usable = np.asarray(is_finite(stored, self.dtype).all(axis=(1, 2, 3)))
        rows: RowArrays = {
            f"hidden/{self.stack}.{layer}": stored[:, place]
            for place, layer in enumerate(self.layers)
        }
        return {**rows, "hidden_mask": np.ones((shard.rows, self.vectors), bool)}, usable

    def _stored(self, values: "Tensor") -> NDArray[Any]:
        """The same bits as [rows, layers, vectors, dim]: nothing is rounded again."""
        import torch

        if self.dtype == "bfloat16":
            values = values.view(torch.uint16)
        shape = (len(values), len(self.layers), self.vectors, self.dim)
        stored: NDArray[Any] = values.numpy().reshape(shape)
        return stored


def read_targets(prototype: Prototype, shard: Shard, layer_count: int) -> PrototypeTargets:
    """Read from the first shard and the metadata what the targets of a folder are.

    Raises:
        CraftError: the prototypes wrote no targets of this shape or dtype, or the recorded layers
            do not fit the tensors.
    """
    target = shard.tensors[shard.target]
    dtype = str(target.dtype).removeprefix("torch.")
    allowed = ("int64", "int32") if shard.target == "labels" else DTYPES
    if target.ndim != _AXES[shard.target] or dtype not in allowed:
        raise _misfit(
            shard,
            f"{shard.target} is {dtype} {list(target.shape)}, not {' or '.join(allowed)} "
            f"with {_AXES[shard.target]} axes",
        )
    if shard.target == "labels":
        return _labels(target, dtype)
    count, vectors = (1, 1) if target.ndim == 2 else target.shape[1:3]
    recorded = _recorded_layers(prototype, shard, layer_count)
    if recorded is not None and len(recorded) != count:
        raise _misfit(
            shard, f"layers {list(recorded)} are recorded, and {shard.target} holds {count}"
        )
    pooling = prototype.field("pooling", kind=str) or _UNKNOWN
    return PrototypeTargets(
        name=shard.target,
        kind="hidden",
        layers=_resolved(recorded or range(count), layer_count, shard),
        layer_count=layer_count,
        layers_known=recorded is not None,
        pooling=_TWO_VECTORS if (target.ndim, vectors) == (4, 2) else pooling,
        vectors=vectors,
        dim=target.shape[-1],
        dtype=dtype,
    )


def _labels(target: "Tensor", dtype: str) -> PrototypeTargets:
    return PrototypeTargets(
        name="labels",
        kind="token_ce",
        layers=(),
        layer_count=1,
        layers_known=True,
        pooling="none",
        vectors=1,
        dim=1,
        dtype=DTYPES[0],
        specs={LABELS: ArraySpec(shape=tuple(target.shape[1:]), dtype=dtype)},
    )


def _recorded_layers(prototype: Prototype, shard: Shard, layer_count: int) -> Sequence[int] | None:
    """The layers by index into the stack, -1 the last; None if they were not recorded."""
    if shard.target == "target_features":
        layer = prototype.field("hidden_layer", kind=int)
        if layer is None:
            layer = read_field(shard.meta, "hidden_layer", kind=int, where=shard.path)
        return None if layer is None else [_below_embedding(layer, layer_count, shard)]
    # The shards record the layers that were stored, the metadata those that were requested.
    names = ("layers_to_save", "hidden_layers", "layers")
    layers = read_field(shard.meta, *names, kind=list, where=shard.path)
    layers = layers or prototype.field(*names, kind=list)
    if layers and not all(type(layer) is int for layer in layers):
        raise _misfit(shard, f"the recorded layers are {layers}, not whole numbers")
    return layers or None


def _resolved(layers: Sequence[int], layer_count: int, shard: Shard) -> tuple[int, ...]:
    try:
        return resolve_layers(layers, layer_count)
    except CraftError as error:
        raise _misfit(shard, f"{error.what} {error.why.removesuffix('.')}") from error


def _below_embedding(index: int, layer_count: int, shard: Shard) -> int:
    """The layer at an index of transformers' `hidden_states`, which starts with the embedding.

    The prototype that wrote target_features indexed that tuple: 0 is the embedding, and k from the
    front is layer k - 1. Counted from the end there is no difference.
    """
    if index in (0, -layer_count - 1):
        raise _misfit(shard, f"hidden_layer {index} is the embedding, not a layer")
    return index - 1 if index > 0 else index


def _misfit(shard: Shard, problem: str) -> CraftError:
    return CraftError(
        f"Cannot import {shard.path}.",
        why=f"{problem}.",
        fix="give the depth of the stack with --layer-count if it is another, or correct "
        "metadata.json; a new cache comes from craft cache build.",
    )
