"""What a plot of a cache shows, as numbers: sizes of states, likeness of rows, sampled episodes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.dtypes import decode
from craftcli.cache.format import layer_names
from craftcli.cache.reader import CacheReader
from craftcli.errors import CraftError

type Floats = NDArray[np.float64]
type Ints = NDArray[np.int64]

MAX_NORM_ROWS = 4096
MAX_NORMS = 20_000
MAX_SIMILAR_ROWS = 200
MAX_LANES = 20
MAX_BINS = 1200
_BLOCK_ROWS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheView:
    """The numbers behind the plot of a cache; lanes are its tasks, the rarest of many in one."""

    rows: int
    """Valid rows."""
    tasks: tuple[str, ...]
    """Names of the tasks that have a lane each."""
    other_tasks: int
    """How many tasks share one more lane, the last."""
    norms: dict[str, Floats]
    """L2 norms of the target vectors by layer, in ascending order."""
    norm_rows: int
    """From how many rows the norms are."""
    similarity: Floats
    """[n, n] cosine of the mean vectors of rows of the deepest layer; empty without one."""
    similarity_lanes: Ints
    """[n] lane of each of these rows, ascending."""
    episode_rows: Ints
    """[lanes, bins] rows by lane and bin of episodes."""
    bin_episodes: int
    """Episodes in a bin: 1 unless there are very many."""
    episodes: int
    """Episodes of the dataset."""
    sampled_episodes: int
    """Episodes with a row."""


def view_cache(reader: CacheReader) -> CacheView:
    """Read what the plot of a cache shows, from its valid rows."""
    valid = np.flatnonzero(reader.read_all("valid"))
    if not valid.size:
        raise CraftError(
            f"Nothing to plot in {reader.path}.",
            why="none of its rows is valid.",
            fix="build the cache again with a teacher whose states are finite.",
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
    )


def group_tasks(task: Ints) -> tuple[list[int], int, Ints]:
    """The tasks that get a lane, how many share one more, and the lane of every row.

    Lanes keep the order of the tasks; beyond `MAX_LANES`, the rarest share the last one.
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
    """At most `most` of the values, at even distances, the first and the last among them."""
    if len(values) <= most:
        return values
    return np.asarray(values[np.linspace(0, len(values) - 1, most).round().astype(int)])


def _norms(reader: CacheReader, layer: str, rows: Ints) -> Floats:
    norms = [
        np.linalg.norm(vectors[mask], axis=-1) for vectors, mask in _blocks(reader, layer, rows)
    ]
    # Evenly spaced in sorted order, so that what is left out does not change the distribution.
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
    """The cosine [n, n] of every pair of vectors [n, d]; 0 for a vector without length."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(length > 0, length, 1.0)
    return np.asarray(np.clip(unit @ unit.T, -1.0, 1.0))


def _blocks(
    reader: CacheReader, layer: str, rows: Ints
) -> Iterator[tuple[Floats, NDArray[np.bool_]]]:
    """Vectors [b, V, D], zeros where there is no target, and targets [b, V], a few rows a time."""
    # One block at least, so that there is something to join.
    for start in range(0, max(len(rows), 1), _BLOCK_ROWS):
        some = rows[start : start + _BLOCK_ROWS]
        mask = reader.read("hidden_mask", some)
        vectors = decode(reader.read(f"hidden/{layer}", some), reader.manifest.dtype)
        yield np.where(mask[:, :, None], vectors, 0.0).astype(np.float64), mask
