"""Lists of datasets with weights, as in `--dataset a --dataset b:0.3`."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

type DatasetNames = str | tuple[str, ...]
"""One dataset, or several: each a name or a folder, with `:WEIGHT` behind it or without."""

_NUMBER = re.compile(
    r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class NamedDataset:
    """One entry of a list of datasets."""

    name: str
    """A folder, a name on the Hub, or demo."""
    weight: float | None = None
    """Its weight among the others; None if it was given none."""


def parse_dataset(text: str) -> NamedDataset:
    r"""Read a name or a folder with an optional weight.

    A folder that exists is a folder, whatever it is called.

    >>> parse_dataset("me/pick:0.3")
    NamedDataset(name='me/pick', weight=0.3)
    >>> parse_dataset("C:\\data\\pick")
    NamedDataset(name='C:\\data\\pick', weight=None)

    Raises:
        ValueError: the text has no name, or a weight that is none.
    """
    name, colon, weight = text.rpartition(":")
    if not colon or re.search(r"[/\\]", weight) or Path(text).expanduser().is_dir():
        if not text.strip():
            raise ValueError("has an empty name")
        return NamedDataset(name=text)
    if not name.strip():
        raise ValueError(f"has {text!r}, which names no dataset before the weight")
    if not _NUMBER.fullmatch(weight):
        raise ValueError(f"has {text!r}, and {weight!r} is no weight, which is a number above 0")
    if not math.isfinite(float(weight)) or float(weight) <= 0:
        raise ValueError(f"gives {name} the weight {weight}, which is not a number above 0")
    return NamedDataset(name=name, weight=float(weight))


def parse_datasets(given: DatasetNames) -> tuple[NamedDataset, ...]:
    """Read one dataset or a list of them.

    Raises:
        ValueError: an entry cannot be read, one is named twice, or a weight has nothing beside it.
    """
    texts = (given,) if isinstance(given, str) else given
    found = tuple(parse_dataset(text) for text in texts)
    if len(found) == 1 and found[0].weight is not None:
        raise ValueError(
            f"gives {found[0].name} a weight, which says something only beside another dataset"
        )
    names = [entry.name for entry in found]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"names {repeated[0]} twice; a weight makes a dataset count more")
    return found


def list_problems(
    option: str, given: DatasetNames | None, *, alone: Mapping[str, object]
) -> list[str]:
    """The problems of a list; `alone` are the options that belong to a single dataset."""
    if given is None:
        return []
    try:
        several = len(parse_datasets(given)) > 1
    except ValueError as error:
        return [f"{option} {error}"]
    return [
        f"{name} belongs to a single {option}: of several, give the folders themselves, as in "
        f"{option} FOLDER_A {option} FOLDER_B:0.3"
        for name, value in alone.items()
        if several and value is not None
    ]
