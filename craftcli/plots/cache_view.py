"""The numbers that the plot of a cache shows: norms, similarity of rows, sampled episodes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.dtypes import decode
from craftcli.cache.format import layer_names
from craftcli.cache.made_rows import (
    deepest_layer,
    made_rows,
    read_deepest_states,
    read_vectors,
    vector_inputs,
)
from craftcli.cache.reading.reader import CacheReader
from craftcli.errors import CraftError

type Floats = NDArray[np.float64]
type Ints = NDArray[np.int64]

MAX_NORM_ROWS = 4096
MAX_NORMS = 20_000
MAX_SIMILAR_ROWS = 200
MAX_LANES = 20
MAX_BINS = 1200
MAX_MAP_ROWS = 1000
_BLOCK_ROWS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class RowMap:
    """Real and made rows on their first two principal components."""

    of: str
    """What the components are of: the vectors that the policy reads, or a layer."""
    real: Floats
    """[n, 2], rows that are frames of a dataset."""
    made: Floats
    """[m, 2], rows that no dataset holds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheView:
    """The numbers of the plot; each task has a lane, and the rarest of many tasks share one."""

    rows: int
    """Valid rows."""
    tasks: tuple[str, ...]
    """Names of the tasks with a lane of their own."""
    other_tasks: int
    """How many tasks share the last lane."""
    norms: dict[str, Floats]
    """L2 norms of the target vectors by layer, in ascending order."""
    norm_rows: int
    """How many rows the norms are from."""
    similarity: Floats
    """[n, n] cosines of the rows' mean vectors in the deepest layer; empty if there is none."""
    similarity_lanes: Ints
    """[n] lane of each of these rows, in ascending order."""
    episode_rows: Ints
    """[lanes, bins] number of rows by lane and bin of episodes."""
    bin_episodes: int
    """Episodes in a bin: 1 unless there are very many."""
    episodes: int
    """Episodes of the dataset."""
    sampled_episodes: int
    """Episodes with at least one row."""
    row_map: RowMap | None
    """Real and made rows; None if no row is made, or if there is nothing to place them by."""


def view_cache(reader: CacheReader) -> CacheView:
    """Read the numbers of the plot from the valid rows of a cache."""
    valid = np.flatnonzero(reader.read_all("valid"))
    if not valid.size:
        raise CraftError(
            f"Cannot plot the cache {reader.path}.",
            why="none of its rows is valid.",
            fix="build the cache again with a teacher that gives finite states.",
        )
    episode, frame = (reader.read_all(f"index/{name}")[valid] for name in ("episode", "frame"))
    tasks, others, lane = group_tasks(reader.read_all("index/task")[valid])
    episodes = max(reader.manifest.dataset.episodes, int(episode.max()) + 1)
    width = -(-episodes // MAX_BINS)
    counts = np.zeros((len(tasks) + (others > 0), -(-episodes // width)), np.int64)
    np.add.at(counts, (lane, episode // width), 1)
    order = np.lexsort((frame, episode, lane))
    layers = layer_names(reader.manifest) if "hidden" in reader.manifest.kinds else []
    similarity, similar_lanes = _similarity(reader, layers, valid[order], lane[order])
    norm_rows = spread(valid, MAX_NORM_ROWS)
    return CacheView(
        rows=len(valid),
        tasks=tuple(reader.tasks[number] for number in tasks),
        other_tasks=others,
        norms={layer: _norms(reader, layer, norm_rows) for layer in layers},
        norm_rows=len(norm_rows),
        similarity=similarity,
        similarity_lanes=similar_lanes,
        episode_rows=counts,
        bin_episodes=width,
        episodes=episodes,
        sampled_episodes=len(np.unique(episode)),
        row_map=_row_map(reader, valid),
    )


def _row_map(reader: CacheReader, valid: Ints) -> RowMap | None:
    """Place rows by the vectors that the policy reads, or else by their deepest layer."""
    if reader.manifest.made is None:
        return None
    by_vectors = bool(vector_inputs(reader))
    if not by_vectors and "hidden" not in reader.manifest.kinds:
        return None
    is_made = made_rows(reader)[valid]
    real, made = (spread(valid[kind], MAX_MAP_ROWS) for kind in (~is_made, is_made))
    rows = np.concatenate([real, made])
    values = (read_vectors if by_vectors else read_deepest_states)(reader, rows)
    places = principal_components(values)
    names = ", ".join(name.removeprefix("inputs/") for name in vector_inputs(reader))
    return RowMap(
        of=names if by_vectors else deepest_layer(reader),
        real=places[: len(real)],
        made=places[len(real) :],
    )


def principal_components(vectors: Floats) -> Floats:
    """The first two principal components [n, 2] of vectors [n, d]; 0 where there are fewer."""
    centred = vectors - vectors.mean(axis=0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    places = np.zeros((len(vectors), 2))
    kept = min(2, len(axes))
    places[:, :kept] = centred @ axes[:kept].T
    return places


def group_tasks(task: Ints) -> tuple[list[int], int, Ints]:
    """The tasks with a lane of their own, how many share the last lane, and the lane of every row.

    Lanes are in the order of the tasks; of more than `MAX_LANES` tasks, the rarest share the last.
    """
    present, counts = np.unique(task, return_counts=True)
    kept = present
    if len(present) > MAX_LANES:
        kept = np.sort(present[np.argsort(-counts, kind="stable")[: MAX_LANES - 1]])
    lane = np.full(len(task), len(kept), np.int64)
    for number, one in enumerate(kept):
        lane[task == one] = number
    return kept.tolist(), len(present) - len(kept), lane


def spread(values: NDArray[Any], most: int) -> NDArray[Any]:
    """At most `most` of the values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return values
    return np.asarray(values[np.linspace(0, len(values) - 1, most).round().astype(int)])


def _norms(reader: CacheReader, layer: str, rows: Ints) -> Floats:
    norms = [
        np.linalg.norm(vectors[mask], axis=-1) for vectors, mask in _blocks(reader, layer, rows)
    ]
    # Evenly spaced in sorted order, so that thinning out keeps the distribution.
    return spread(np.sort(np.concatenate(norms)), MAX_NORMS)


def _similarity(
    reader: CacheReader, layers: list[str], rows: Ints, lanes: Ints
) -> tuple[Floats, Ints]:
    if not layers:
        return np.zeros((0, 0)), np.zeros(0, np.int64)
    has_target = reader.read("hidden_mask", rows).any(axis=1)
    picked = spread(np.flatnonzero(has_target), MAX_SIMILAR_ROWS)
    deepest = layers[int(np.argmax(reader.manifest.layers))]
    means = [
        (vectors * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1)[:, None]
        for vectors, mask in _blocks(reader, deepest, rows[picked])
    ]
    return cosines(np.concatenate(means)), lanes[picked]


def cosines(vectors: Floats) -> Floats:
    """The cosine [n, n] of every pair of vectors [n, d]; 0 for a zero vector."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(length > 0, length, 1.0)
    return np.asarray(np.clip(unit @ unit.T, -1.0, 1.0))


def _blocks(
    reader: CacheReader, layer: str, rows: Ints
) -> Iterator[tuple[Floats, NDArray[np.bool_]]]:
    """Vectors [b, V, D], zero without a target, and the mask of targets [b, V], in small blocks."""
    # At least one block, because the caller concatenates them.
    for start in range(0, max(len(rows), 1), _BLOCK_ROWS):
        some = rows[start : start + _BLOCK_ROWS]
        mask = reader.read("hidden_mask", some)
        vectors = decode(reader.read(f"hidden/{layer}", some), reader.manifest.dtype)
        yield np.where(mask[:, :, None], vectors, 0.0).astype(np.float64), mask
