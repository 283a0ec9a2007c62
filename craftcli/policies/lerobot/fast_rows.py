"""Reading numbers of a LeRobotDataset directly from its Arrow table, without `datasets`.

For each column that is read, `datasets` copies the description of all columns, and it makes a
Python number of every value. Two states and 16 actions take 1.7 ms that way and 0.2 ms from the
table (tests/benchmarks/row_read.py); a training step of a small policy reads 32 such rows and takes
24 ms. Everything else about an item (its chunk, padding, images, videos) is still LeRobot's work.
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray


class FastRows:
    """Replaces the `datasets.Dataset` inside a LeRobotDataset and returns exactly the same."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        read = {name: _Numbers.of(stored, name) for name in stored.column_names}
        self._numbers = {name: numbers for name, numbers in read.items() if numbers is not None}
        others = [name for name in read if name not in self._numbers]
        self._others = stored.select_columns(others) if others else None

    @classmethod
    def install(cls, dataset: Any) -> None:
        """Let a LeRobotDataset read its rows through this class."""
        stored = dataset.hf_dataset
        # Not for rows in another order than the table's; LeRobot makes no such datasets.
        if stored._indices is None:
            dataset.reader.hf_dataset = cls(stored)

    def __reduce__(self) -> tuple[type[Self], tuple[Any]]:
        # `datasets` sends file names to worker processes; the numbers would be copied.
        return type(self), (self._stored,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, key: Any) -> Any:
        match key:
            case str() if key in self._numbers:
                return self._numbers[key]
            case int() if 0 <= key < len(self):
                row = self._others[key] if self._others else {}
                return row | {name: column[[key]][0] for name, column in self._numbers.items()}
            case list():
                rows = self._others[key] if self._others else {}
                return rows | {name: column[key] for name, column in self._numbers.items()}
            case _:
                return self._stored[key]


class _Numbers:
    """A column of numbers or vectors as views of the table: mapped from disk, not copied."""

    def __init__(
        self, stored: Any, name: str, parts: Sequence[NDArray[Any]], dtype: type[np.generic]
    ) -> None:
        self._stored, self._name = stored, name
        self._parts = parts
        self._dtype = dtype
        self._ends = np.cumsum([len(part) for part in parts])

    @classmethod
    def of(cls, stored: Any, name: str) -> Self | None:
        """The column of that name; None if it holds anything else or has gaps."""
        parts = number_parts(stored.data.column(name))
        # The dtypes that `torch.tensor` gives to Python's numbers.
        dtypes = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32}
        return cls(stored, name, parts, dtypes[parts[0].dtype.kind]) if parts else None

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, key: Any) -> Any:
        # LeRobot reads lists of rows; anything else goes to `datasets`.
        if not isinstance(key, list) or not key or min(key) < 0 or max(key) >= len(self):
            return self._stored[self._name][key]
        found = []
        for row, number in zip(key, np.searchsorted(self._ends, key, side="right"), strict=True):
            part = self._parts[number]
            value = part[row - self._ends[number] + len(part)]
            found.append(torch.from_numpy(np.array(value, dtype=self._dtype)))
        return found


def number_parts(column: pa.ChunkedArray) -> list[NDArray[Any]] | None:
    """A column of numbers, or of vectors of one length; None if it holds anything else or gaps."""
    kind, vectors = column.type, pa.types.is_fixed_size_list(column.type)
    number = kind.value_type if vectors else kind
    if not (pa.types.is_boolean(number) or _is_number(number)) or column.null_count:
        return None
    parts = []
    for chunk in column.chunks:
        values = chunk.flatten() if vectors else chunk
        if values.null_count:
            return None
        part = values.to_numpy(zero_copy_only=False)
        parts.append(part.reshape(-1, kind.list_size) if vectors else part)
    return parts


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))
