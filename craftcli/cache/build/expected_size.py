"""How large a cache will be, known from its first row, and what would make it smaller."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from craftcli.cache.format import Manifest, layer_names
from craftcli.cache.storage.chunks import RowArrays
from craftcli.cache.storage.packed_chunks import empty_share, packed_bytes
from craftcli.choices import Pooling

_PACKED = ("hidden/", "outputs/")
"""Before the names of arrays with a slot for each token."""
_EMPTY = 0.25
"""Rows with fewer empty slots are stored whole: they are read a little faster."""
_MOMENT_BYTES = 16
"""Bytes of a mean and a variance in float64."""
_MEANS = {Pooling.ACTION_TOKENS: Pooling.MEAN_ACTION_TOKENS}
"""For a pooling with several vectors, one that stores their mean."""


def arrays_to_pack(first: RowArrays) -> tuple[str, ...] | None:
    """The arrays that leave many slots of the first row empty; None if there are none."""
    found = tuple(
        name
        for name, values in sorted(first.items())
        if name.startswith(_PACKED) and values.ndim > 2 and empty_share(values) >= _EMPTY
    )
    return found or None


@dataclass(frozen=True, kw_only=True)
class ExpectedSize:
    """Bytes of a cache, if all rows have as many tokens as the first one."""

    rows: int
    hidden_bytes: int
    """Bytes of one layer in a row."""
    layers: int
    other_bytes: int
    """Bytes of everything else in a row."""
    stats_bytes: int
    """Bytes of the statistics of one layer."""

    @classmethod
    def of(cls, manifest: Manifest, first: RowArrays) -> Self:
        """The size of a cache with this first row."""
        packed = manifest.packed or ()
        sizes = {
            name: packed_bytes(values) if name in packed else values.nbytes
            for name, values in first.items()
        }
        layers = [f"hidden/{layer}" for layer in layer_names(manifest)]
        filled = manifest.vectors
        if layers and layers[0] in packed:
            filled = int(np.count_nonzero(first["hidden_mask"]))
        return cls(
            rows=manifest.rows,
            hidden_bytes=sizes[layers[0]] if layers else 0,
            layers=len(layers),
            other_bytes=sum(size for name, size in sizes.items() if name not in layers),
            stats_bytes=filled * manifest.dim * _MOMENT_BYTES,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.layers * self.hidden_bytes + self.other_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows and of the statistics."""
        return self.rows * self.row_bytes + self.layers * self.stats_bytes

    def smaller(self, manifest: Manifest, samples: int | None) -> Mapping[str, int]:
        """The bytes with other options, by the option; `samples` is the number of anchors, if any.

        A cache of this manifest has this size.
        """
        ways = {}
        if self.layers and manifest.dtype == "float32":
            ways["--dtype bfloat16"] = replace(self, hidden_bytes=self.hidden_bytes // 2)
        if mean := _MEANS.get(Pooling(manifest.pooling)) if manifest.vectors > 1 else None:
            vector = manifest.dim * (4 if manifest.dtype == "float32" else 2)
            stats = manifest.dim * _MOMENT_BYTES
            ways[f"--pooling {mean}"] = replace(self, hidden_bytes=vector, stats_bytes=stats)
        if self.layers > 1:
            ways["--layers -1"] = replace(self, layers=1)
        if samples and samples > 1:
            ways[f"--samples {samples // 2}"] = replace(self, rows=self.rows // 2)
        return {option: size.total_bytes for option, size in ways.items()}
