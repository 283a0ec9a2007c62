"""Rows from somewhere else, cut into the chunks of a cache; at most a part and a chunk are held."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.writer import CacheWriter

type Rows = dict[str, NDArray[Any]]


def write_all(writer: CacheWriter, parts: Iterable[Rows], on_rows: Callable[[int], None]) -> None:
    """Write parts of any size as the rows of a cache, in their order, and finish it."""
    for chunk, rows in enumerate(regroup(parts, writer.manifest.rows_per_chunk)):
        writer.write_chunk(chunk, rows)
        on_rows(row_count(rows))
    writer.finish()


def regroup(parts: Iterable[Rows], size: int) -> Iterator[Rows]:
    """The same rows in the same order, `size` at a time; the last group may be smaller."""
    waiting: list[Rows] = []
    missing = size
    for part in parts:
        start, rows = 0, row_count(part)
        while rows - start >= missing:
            waiting.append(_cut(part, start, start + missing))
            yield _joined(waiting)
            waiting, start, missing = [], start + missing, size
        if start < rows:
            # A view would keep the whole part in memory.
            rest = {name: values.copy() for name, values in _cut(part, start, rows).items()}
            waiting.append(rest)
            missing -= rows - start
    if waiting:
        yield _joined(waiting)


def row_count(rows: Rows) -> int:
    """Rows in each of the arrays."""
    return len(next(iter(rows.values())))


def _cut(part: Rows, start: int, stop: int) -> Rows:
    return {name: values[start:stop] for name, values in part.items()}


def _joined(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
