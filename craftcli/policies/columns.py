"""The rows of a LeRobotDataset, with their numbers taken from its table, past `datasets`.

`datasets` copies the description of all columns for each one that is asked for, and makes a Python
number of every value: 1.7 ms for two states and 16 actions, of which 0.2 ms are left
(tests/benchmarks/row_read.py), and a step of a small policy takes 24 ms for 32 of them. Everything
else about an item (its chunk, padding, images, videos) stays LeRobot's own work.
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray


class Columns:
    """Stands in for the `datasets.Dataset` of a LeRobotDataset, and gives exactly what it gives."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        read = {name: _Numbers.of(stored, name) for name in stored.column_names}
        self._numbers = {name: numbers for name, numbers in read.items() if numbers is not None}
        others = [name for name in read if name not in self._numbers]
        self._others = stored.select_columns(others) if others else None

    @classmethod
    def into(cls, dataset: Any) -> None:
        """Let a LeRobotDataset read its rows from here."""
        stored = dataset.hf_dataset
        # Rows in another order than the table's, which LeRobot does not make, stay as they are.
        if stored._indices is None:
            dataset.reader.hf_dataset = cls(stored)

    def __reduce__(self) -> tuple[type[Self], tuple[Any]]:
        # To workers `datasets` are sent as names of files; numbers would be copied.
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
    """A column of numbers or of vectors, as it lies in the table: mapped from disk, not copied."""

    def __init__(
        self, stored: Any, name: str, parts: Sequence[NDArray[Any]], dtype: type[np.generic]
    ) -> None:
        self._stored, self._name = stored, name
        self._parts = parts
        self._dtype = dtype
        self._ends = np.cumsum([len(part) for part in parts])

    @classmethod
    def of(cls, stored: Any, name: str) -> Self | None:
        """None for a column of anything else, or with gaps."""
        parts = number_parts(stored.data.column(name))
        # What `torch.tensor` makes of Python's numbers.
        dtypes = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32}
        return cls(stored, name, parts, dtypes[parts[0].dtype.kind]) if parts else None

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, key: Any) -> Any:
        # LeRobot asks for lists of rows.
        if not isinstance(key, list) or not key or min(key) < 0 or max(key) >= len(self):
            return self._stored[self._name][key]
        found = []
        for row, number in zip(key, np.searchsorted(self._ends, key, side="right"), strict=True):
            part = self._parts[number]
            value = part[row - self._ends[number] + len(part)]
            found.append(torch.from_numpy(np.array(value, dtype=self._dtype)))
        return found


def number_parts(column: pa.ChunkedArray) -> list[NDArray[Any]] | None:
    """A column's numbers, or vectors of one length; None for anything else, or with gaps."""
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
