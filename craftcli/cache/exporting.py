"""A cache as one safetensors file, for programs that know neither zarr nor craft.

The file is written here and not by the safetensors library, which would hold all of it in memory:
eight bytes with the length of a JSON header, the header, then the tensors one after the other.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from craftcli.cache.chunks import ArraySpec
from craftcli.cache.disk import disk_full, sync_one
from craftcli.cache.reader import CacheReader
from craftcli.errors import CraftError
from craftcli.locations import Location

_DTYPES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """What an export will write."""

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
    """What an export wrote."""

    source: str
    output: str
    rows: int
    tensors: list[str]
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def plan_export(path: Location, *, inputs: bool = True) -> ExportPlan:
    """Open the cache and choose its arrays: all of them, or all but the model inputs."""
    # Every row is read once: keeping them in memory would gain nothing.
    reader = CacheReader.open(path, memory="mmap")
    names = [name for name in reader.array_names() if inputs or not name.startswith("inputs/")]
    # Wide numbers first, so that every tensor begins at a multiple of its own width.
    names.sort(key=lambda name: -np.dtype(reader.spec(name).dtype).itemsize)
    return ExportPlan(reader=reader, names=tuple(names))


def export_cache(
    plan: ExportPlan, output: Path, *, overwrite: bool, on_rows: Callable[[int], None]
) -> ExportReport:
    """Write a cache to `output`, which appears whole or not at all; rows stay in their order.

    The names of the tensors are those of the arrays. The metadata of the file are the group's
    attributes "craft" (the manifest), "arrays" and "tasks", each as JSON. `on_rows` gets the rows
    of every tensor.

    Raises:
        CraftError: `output` is taken or cannot be written, or a chunk of the cache is damaged.
    """
    manifest = plan.reader.manifest
    with _whole_or_not(output, plan.payload_bytes, overwrite=overwrite) as file:
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
    """Refuse an output that is no file, or one that is there already."""
    if output.is_dir():
        raise CraftError(
            f"{output} is a folder.",
            why="an export is one file.",
            fix="give a file name, such as -o anchors.safetensors.",
        )
    if os.path.lexists(output) and not overwrite:
        raise CraftError(
            f"{output} already exists.",
            why="a file is not replaced unless you ask for it.",
            fix="pass --overwrite, or choose another path.",
        )


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
    # Readers map the file and want the tensors to begin at a multiple of eight.
    return header + b" " * (-len(header) % 8)


def _dtype(spec: ArraySpec) -> str:
    return _DTYPES[spec.craft_dtype]


@contextmanager
def _whole_or_not(output: Path, need: int, *, overwrite: bool) -> Iterator[BinaryIO]:
    """A file beside `output` that takes its place when all went well, and is removed if not."""
    check_file(output, overwrite=overwrite)
    # A link is followed, so that it still points to the file afterwards.
    output = output.resolve()
    partial = output.with_name(f"{output.name}.{os.getpid()}.partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with disk_full(output, need), partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check_file(output, overwrite=overwrite)
        partial.replace(output)
        sync_one(output.parent)
    except OSError as error:
        raise CraftError(
            f"Cannot write {output}.",
            why=f"{error.strerror or error}.",
            fix="choose a folder that you may write to.",
        ) from error
    finally:
        # There is nothing left of a success, and after a failure there may be no folder.
        with suppress(OSError):
            partial.unlink()
