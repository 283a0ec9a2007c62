"""Exports a cache as one safetensors file, for programs without zarr and craft.

The file is written here and not by the safetensors library, which would hold all of it in memory:
eight bytes with the length of a JSON header, the header, then the tensors one after the other.
"""

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.local_destination import is_craft_cache
from craftcli.cache.storage.local_folder import explain_full_disk
from craftcli.errors import CraftError
from craftcli.locations import Location
from craftcli.whole_files import remove_leftovers, whole_file

_DTYPES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}


_HEADER_START = b'{"__metadata__": {"craft": '


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """The cache and the arrays of an export."""

    reader: CacheReader
    names: tuple[str, ...]
    """The arrays, in the order of the file."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors."""
        rows = self.reader.manifest.rows
        return rows * sum(self.reader.spec(name).row_bytes for name in self.names)


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The result of an export."""

    source: str
    output: str
    rows: int
    tensors: list[str]
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def plan_export(path: Location, *, inputs: bool = True) -> ExportPlan:
    """Open the cache and choose its arrays: all of them, or all except the model inputs."""
    # Every row is read once, so that keeping rows in memory would gain nothing.
    reader = CacheReader.open(path, memory="mmap")
    names = [name for name in reader.array_names() if inputs or not name.startswith("inputs/")]
    # Wide numbers first, so that every tensor begins at a multiple of its own width.
    names.sort(key=lambda name: -np.dtype(reader.spec(name).dtype).itemsize)
    return ExportPlan(reader=reader, names=tuple(names))


def export_cache(
    plan: ExportPlan, output: Path, *, overwrite: bool, on_rows: Callable[[int], None]
) -> ExportReport:
    """Write a cache to `output`, which appears whole or not at all; rows stay in their order.

    The tensors have the names of the arrays. The metadata of the file are the group's attributes
    "craft" (the manifest), "arrays" and "tasks", each as JSON. `on_rows` is called with the number
    of rows of every chunk of every tensor.

    Raises:
        CraftError: `output` is taken or cannot be written, or a chunk of the cache is damaged.
    """
    manifest = plan.reader.manifest
    with _output_file(output, plan.payload_bytes, overwrite=overwrite) as file:
        header = _header(plan)
        file.write(len(header).to_bytes(8, "little") + header)
        for name in plan.names:
            for chunk in range(manifest.chunk_count):
                where = manifest.chunk_rows(chunk)
                values = plan.reader.read(name, np.arange(where.start, where.stop))
                little = values.astype(values.dtype.newbyteorder("<"), copy=False)
                file.write(np.ascontiguousarray(little).data)
                on_rows(len(values))
    return ExportReport(
        source=str(plan.reader.path),
        output=str(output),
        rows=manifest.rows,
        tensors=sorted(plan.names),
        size_bytes=output.stat().st_size,
    )


def check_file(output: Path, *, overwrite: bool) -> None:
    """Refuse a folder, a path inside a cache, and a file that may not be replaced."""
    if output.is_dir():
        raise CraftError(
            f"{output} is a folder.",
            why="an export is one file.",
            fix="give a file name, such as -o anchors.safetensors.",
        )
    if os.path.lexists(output) and not overwrite:
        raise CraftError(
            f"{output} already exists.",
            why="a file is only replaced with --overwrite.",
            fix="pass --overwrite, or choose another path.",
        )
    if os.path.lexists(output) and not _is_export(output):
        raise CraftError(
            f"Refusing to overwrite {output}: it is not an export of craft's.",
            why="craft replaces nothing but its own files.",
            fix="choose another path, or move what is there away.",
        )
    inside = next((folder for folder in output.resolve().parents if is_craft_cache(folder)), None)
    if inside:
        raise CraftError(
            f"Cannot write {output}.",
            why=f"it is inside the cache {inside}, which would no longer be craft's alone.",
            fix="choose a path outside of it.",
        )


def _is_export(file: Path) -> bool:
    """Whether a file is missing, empty, or begins as `export_cache` writes it; follows links."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return False
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            start = opened.read(min(length, len(_HEADER_START)))
    except FileNotFoundError:
        return True  # a link to nothing
    except OSError:
        return False
    return not length or start == _HEADER_START


def _header(plan: ExportPlan) -> bytes:
    reader = plan.reader
    specs = {name: reader.spec(name) for name in plan.names}
    metadata = {
        "craft": reader.manifest.to_json(),
        "arrays": {name: spec.to_json() for name, spec in specs.items()},
        "tasks": list(reader.tasks),
    }
    entries: dict[str, Any] = {
        "__metadata__": {key: json.dumps(value) for key, value in metadata.items()}
    }
    start = 0
    for name, spec in specs.items():
        stop = start + reader.manifest.rows * spec.row_bytes
        shape = [reader.manifest.rows, *spec.shape]
        entries[name] = {"dtype": _dtype(spec), "shape": shape, "data_offsets": [start, stop]}
        start = stop
    header = json.dumps(entries).encode()
    # Readers map the file and need tensors that begin at a multiple of eight.
    return header + b" " * (-len(header) % 8)


def _dtype(spec: ArraySpec) -> str:
    return _DTYPES[spec.craft_dtype]


@contextmanager
def _output_file(output: Path, need: int, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Open a file that becomes `output` when the block ends; `need` is its size in bytes."""
    check_file(output, overwrite=overwrite)
    # A link is followed, so that it still points to the file afterwards.
    output = output.resolve()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(output)
        with explain_full_disk(output, need), whole_file(output) as file:
            yield file
            # Somebody may have written there meanwhile.
            check_file(output, overwrite=overwrite)
    except OSError as error:
        raise CraftError(
            f"Cannot write {output}.",
            why=f"{error.strerror or error}.",
            fix="choose a folder that you may write to.",
        ) from error
