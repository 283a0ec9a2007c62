"""Cuts rows of another source into the chunks of a cache; holds one part and one chunk."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from craftcli.cache.storage.chunks import RowArrays
from craftcli.cache.writing.writer import CacheWriter


def write_all(
    writer: CacheWriter, parts: Iterable[RowArrays], on_rows: Callable[[int], None]
) -> None:
    """Write parts of any size as the rows of a cache, in order, and finish the cache."""
    for chunk, rows in enumerate(regroup(parts, writer.manifest.rows_per_chunk)):
        writer.write_chunk(chunk, rows)
        on_rows(row_count(rows))
    writer.finish()


def regroup(parts: Iterable[RowArrays], size: int) -> Iterator[RowArrays]:
    """Yield the same rows in the same order, `size` at a time; the last group may be smaller."""
    held: list[RowArrays] = []
    missing = size
    for part in parts:
        start, rows = 0, row_count(part)
        while rows - start >= missing:
            held.append(_cut(part, start, start + missing))
            yield _joined(held)
            held, start, missing = [], start + missing, size
        if start < rows:
            # A view would keep the whole part in memory.
            rest = {name: values.copy() for name, values in _cut(part, start, rows).items()}
            held.append(rest)
            missing -= rows - start
    if held:
        yield _joined(held)


def row_count(rows: RowArrays) -> int:
    """Number of rows."""
    return len(next(iter(rows.values())))


def _cut(part: RowArrays, start: int, stop: int) -> RowArrays:
    return {name: values[start:stop] for name, values in part.items()}


def _joined(parts: list[RowArrays]) -> RowArrays:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
