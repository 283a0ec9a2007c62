"""The cache folders of the public CRaFT prototypes: `metadata.json` and `shard_<number>.pt`.

A shard is a pickled dict of tensors with B rows: `pixel_values`, `input_ids`, `attention_mask`, and
one of

    target_features [B, D]        one pooled vector of one layer
    teacher_hidden  [B, L, V, D]  of L layers, the mean of the vision tokens and the last text token
    labels          [B, S]        token ids, -100 where nothing is to be predicted

Pickles can run code, so they are read with torch's `weights_only`, which accepts tensors and plain
values and refuses everything else.
"""

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from craftcli.errors import CraftError

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = ("pixel_values", "input_ids", "attention_mask")
TARGETS = ("target_features", "teacher_hidden", "labels")
COUNTS = ("num_samples", "num_anchors")


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """The contents of one shard file."""

    path: Path
    target: str
    """Which of the targets it holds."""
    tensors: "dict[str, Tensor]"
    """The inputs and the target by name, the rows first."""
    meta: Mapping[str, Any]
    """What the prototype recorded with them."""

    @property
    def rows(self) -> int:
        """Rows of every tensor."""
        return len(self.tensors[self.target])

    @property
    def layout(self) -> dict[str, str]:
        """Row shape and dtype of every tensor, which all shards of a folder share."""
        return {
            name: f"{tensor.dtype} {list(tensor.shape[1:])}"
            for name, tensor in self.tensors.items()
        }


@dataclass(frozen=True, kw_only=True)
class Prototype:
    """A cache folder that a prototype wrote."""

    folder: Path
    metadata: Mapping[str, Any]
    files: tuple[Path, ...]
    """The shards in the order of their numbers."""

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of rows in the metadata, by field name; empty if there are none."""
        found = {name: self.field(name, kind=int) for name in COUNTS}
        return {name: count for name, count in found.items() if count is not None}

    def shards(self) -> Iterator[Shard]:
        """Load the shards one after the other."""
        return (load_shard(file) for file in self.files)

    def field[T](self, *names: str, kind: type[T]) -> T | None:
        """The first of these metadata fields that exists; None if none does."""
        return read_field(self.metadata, *names, kind=kind, where=self.folder / "metadata.json")


def open_prototype(folder: Path) -> Prototype:
    """Find the files of a prototype's cache; the shards are not read yet.

    Raises:
        CraftError: there is no such folder, or a file is missing or not readable.
    """
    if not folder.is_dir():
        raise CraftError(
            f"No prototype cache at {folder}.",
            why="there is no such folder.",
            fix="give the folder that holds metadata.json and shard_0000.pt.",
        )
    numbered: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):
        if match := re.fullmatch(r"shard_(\d+)\.pt", file.name):
            first = numbered.setdefault(int(match[1]), file)
            if first != file:
                raise CraftError(
                    f"{folder} has two shards with one number.",
                    why=f"{first.name} and {file.name} are both number {int(match[1])}.",
                    fix="move the one away that does not belong to this cache.",
                )
    metadata = _read_metadata(folder)
    if not numbered:
        names = sorted(file.name for file in folder.iterdir())
        raise CraftError(
            f"{folder} has no shards.",
            why=f"there is no shard_0000.pt, only {', '.join(names[:5])}.",
            fix="give the folder that a prototype's build_anchor_cache wrote.",
        )
    files = tuple(numbered[number] for number in sorted(numbered))
    return Prototype(folder=folder, metadata=metadata, files=files)


def load_shard(path: Path) -> Shard:
    """Read one shard without running any code in it.

    Raises:
        CraftError: it holds more than tensors and plain values, or not what a prototype writes.
    """
    content = _load(path)
    found = [name for name in TARGETS if isinstance(content, dict) and name in content]
    if len(found) != 1:
        names = ", ".join(map(str, content)) if isinstance(content, dict) else type(content)
        raise _unusable(path, f"it must hold one of {', '.join(TARGETS)}, and holds {names}")
    return _checked(path, content, found[0])


def read_field[T](fields: Mapping[str, Any], *names: str, kind: type[T], where: Path) -> T | None:
    """The first of the fields that exists, None if none does; another type is refused."""
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None:
        return None
    value = fields[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CraftError(
            f"Cannot use {where}.",
            why=f"its {name} is {value!r}, not of type {kind.__name__}.",
            fix=f"correct {name}, or remove it.",
        )
    return value


def _read_metadata(folder: Path) -> dict[str, Any]:
    try:
        metadata = json.loads((folder / "metadata.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CraftError(
            f"{folder} is not a prototype's cache.",
            why=f"its metadata.json cannot be read ({error}).",
            fix="give the folder that holds metadata.json and shard_0000.pt.",
        ) from error
    if not isinstance(metadata, dict):
        raise CraftError(
            f"{folder} is not a prototype's cache.",
            why=f"its metadata.json holds {type(metadata).__name__}, not an object.",
            fix="restore metadata.json; {} is enough for the rows that are there.",
        )
    return metadata


def _load(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Torch's own message suggests switching the protection off.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        what = refused[1] if refused else "more than that"
        raise CraftError(
            f"Refused to load {path}.",
            why=f"only tensors and plain values are loaded, and its pickle needs {what}, which "
            "could run any code.",
            fix="do not use this file unless you know who made it; no code in it was run.",
        ) from error
    # A damaged file fails in many ways: as a zip, as a pickle, or when a tensor is built.
    except Exception as error:
        raise _unusable(path, f"it cannot be read ({type(error).__name__}: {error})") from error


def _checked(path: Path, content: dict[str, Any], target: str) -> Shard:
    names = (*INPUTS, target)
    missing = [name for name in names if not _is_plain_tensor(content.get(name))]
    if missing:
        raise _unusable(path, f"it has no plain tensor {', '.join(missing)}")
    tensors: dict[str, Tensor] = {name: content[name].detach() for name in names}
    if any(tensor.ndim < 1 or 0 in tensor.shape[1:] for tensor in tensors.values()):
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise _unusable(path, f"a tensor has no rows or nothing in a row: {shapes}")
    if len({len(tensor) for tensor in tensors.values()}) > 1:
        rows = ", ".join(f"{name} {len(tensor)}" for name, tensor in tensors.items())
        raise _unusable(path, f"its tensors differ in their number of rows: {rows}")
    meta = content.get("meta")
    return Shard(
        path=path, target=target, tensors=tensors, meta=meta if isinstance(meta, dict) else {}
    )


def _is_plain_tensor(value: Any) -> bool:
    """Whether numpy can hold it: `weights_only` also accepts sparse and other tensors."""
    import torch

    if not isinstance(value, torch.Tensor) or value.is_quantized or value.is_complex():
        return False
    return value.layout == torch.strided and value.device.type == "cpu"


def _unusable(path: Path, problem: str) -> CraftError:
    return CraftError(
        f"Cannot import {path}.",
        why=f"{problem}.",
        fix="restore the shard from a copy, or build a new cache with craft cache build.",
    )
