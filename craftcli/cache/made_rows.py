"""Made rows beside real ones: how many there are, and how far they lie from each other."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.dtypes import decode
from craftcli.cache.format import layer_names
from craftcli.cache.variations import SEEDS

if TYPE_CHECKING:
    from craftcli.cache.reading.reader import CacheReader

type Floats = NDArray[np.float64]
type Rows = NDArray[np.intp]

MOST_ROWS = 1024
"""Rows of each kind that are compared, spread over the cache."""
_OBSERVATION = "inputs/observation."
_LAST_DIMENSION = 2
"""A vector, or a history of vectors; images have more dimensions."""
_BLOCK_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Root mean square distance of rows to the nearest real row, median over the rows."""

    of: str
    """What is compared: the vectors that the policy reads, or the states of a layer."""
    made: float
    """From a made row to the nearest real one."""
    real: float | None
    """From a real row to the nearest other one; None if there is only one."""


@dataclass(frozen=True, kw_only=True)
class MadeRowsSummary:
    """The made rows of a cache."""

    source: str
    """How they were made, in words."""
    rows: int
    """Made rows, valid or not."""
    real_rows: int
    """Frames as they are."""
    valid_rows: int
    """Made rows that may be trained on."""
    distances: tuple[Distance, ...]
    """Vectors in units of the teacher's normaliser, layers in deviations of their states; empty if
    there are no real rows."""


def summarize_made_rows(reader: "CacheReader") -> MadeRowsSummary | None:
    """Count the made rows and compare them with the real ones; None if there are none."""
    made = reader.manifest.made
    if made is None:
        return None
    is_made, valid = made_rows(reader), reader.read_all("valid")
    chosen = [spread_rows(np.flatnonzero(valid & kind)) for kind in (is_made, ~is_made)]
    return MadeRowsSummary(
        source=made.describe(),
        rows=int(is_made.sum()),
        real_rows=int((~is_made).sum()),
        valid_rows=int((is_made & valid).sum()),
        distances=_distances(reader, *chosen),
    )


def made_rows(reader: "CacheReader") -> NDArray[np.bool_]:
    """Which rows of a cache were made."""
    if SEEDS not in reader.array_names():
        return np.zeros(reader.manifest.rows, dtype=bool)
    return np.asarray(reader.read_all(SEEDS) >= 0)


def vector_inputs(reader: "CacheReader") -> list[str]:
    """The arrays of a cache with the vectors that the policy reads."""
    return [
        name
        for name in reader.array_names()
        if name.startswith(_OBSERVATION)
        and reader.spec(name).dtype.startswith("float")
        and 1 <= len(reader.spec(name).shape) <= _LAST_DIMENSION
    ]


def read_vectors(reader: "CacheReader", rows: Rows) -> Floats:
    """The vectors that the policy reads, one after the other [rows, numbers]."""
    parts = [reader.read(name, rows).reshape(len(rows), -1) for name in vector_inputs(reader)]
    vectors: Floats = np.concatenate(parts, axis=1).astype(np.float64)
    return vectors


def read_deepest_states(reader: "CacheReader", rows: Rows) -> Floats:
    """The mean vector of each row in the deepest layer [rows, D], in deviations of its numbers."""
    layer = deepest_layer(reader)
    means = []
    # In blocks, because a row can have many tokens.
    for start in range(0, len(rows), _BLOCK_ROWS):
        some = rows[start : start + _BLOCK_ROWS]
        mask = reader.read("hidden_mask", some)[:, :, None]
        vectors = decode(reader.read(f"hidden/{layer}", some), reader.manifest.dtype)
        total = np.where(mask, vectors, 0.0).sum(axis=1, dtype=np.float64)
        means.append(total / np.maximum(mask.sum(axis=1), 1))
    states = np.concatenate(means)
    deviation = np.sqrt(reader.stats(layer).variance.mean(axis=0))
    moves = deviation > 0
    return np.asarray(states[:, moves] / deviation[moves])


def deepest_layer(reader: "CacheReader") -> str:
    """The name of the deepest layer of a cache with hidden states."""
    manifest = reader.manifest
    return layer_names(manifest)[int(np.argmax(manifest.layers))]


def nearest(rows: Floats, others: Floats, *, same: bool = False) -> Floats:
    """Root mean square distance of each row to the nearest of the others.

    With `same` both are the same rows, and no row is its own neighbour.
    """
    found = np.empty(len(rows))
    for start in range(0, len(rows), _BLOCK_ROWS):
        some = rows[start : start + _BLOCK_ROWS]
        # |a - b|² = |a|² + |b|² - 2 a·b: no array of all differences is needed.
        squares = (some**2).sum(1)[:, None] + (others**2).sum(1) - 2 * some @ others.T
        if same:
            own = np.arange(len(some))
            squares[own, own + start] = np.inf
        found[start : start + _BLOCK_ROWS] = squares.min(axis=1)
    return np.asarray(np.sqrt(np.maximum(found, 0) / max(rows.shape[1], 1)))


def _distances(reader: "CacheReader", made: Rows, real: Rows) -> tuple[Distance, ...]:
    if not len(made) or not len(real):
        return ()
    found = []
    if vector_inputs(reader):
        names = ", ".join(name.removeprefix("inputs/") for name in vector_inputs(reader))
        found.append(_distance(names, read_vectors(reader, made), read_vectors(reader, real)))
    if "hidden" in reader.manifest.kinds:
        states = [read_deepest_states(reader, rows) for rows in (made, real)]
        found.append(_distance(deepest_layer(reader), *states))
    return tuple(found)


def _distance(of: str, made: Floats, real: Floats) -> Distance:
    among = float(np.median(nearest(real, real, same=True))) if len(real) > 1 else None
    return Distance(of=of, made=float(np.median(nearest(made, real))), real=among)


def spread_rows(rows: Rows, most: int = MOST_ROWS) -> Rows:
    """At most `most` of the rows, evenly spaced."""
    if len(rows) <= most:
        return rows
    return np.asarray(rows[np.linspace(0, len(rows) - 1, most).round().astype(int)])
