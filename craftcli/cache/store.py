"""Everything zarr: how a cache's group and arrays are made, opened and checked.

This is the one module that imports zarr. `writer` writes rows through the arrays it makes, `reader`
reads the chunk files past zarr once their metadata is checked. `format` describes the arrays.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec

from craftcli.cache.chunks import ArraySpec, ChunkFiles
from craftcli.cache.dtypes import storage_dtype
from craftcli.cache.format import Manifest, layer_names
from craftcli.cache.places import missing_cache
from craftcli.errors import CraftError


@dataclass(frozen=True, kw_only=True)
class OpenedCache:
    """A complete cache whose metadata was checked; its chunks were not."""

    manifest: Manifest
    """What the cache says of itself."""
    tasks: tuple[str, ...]
    """Task strings that index/task points into."""
    specs: dict[str, ArraySpec]
    """The arrays with a row axis."""
    files: dict[str, ChunkFiles]
    """Chunk files of every array, `commit` and `stats/` included."""


def required_arrays(manifest: Manifest) -> dict[str, ArraySpec]:
    """The arrays every cache with this manifest has; the inputs come on top."""
    arrays = {
        f"index/{name}": ArraySpec(shape=(), dtype="int64")
        for name in ("dataset_index", "episode", "frame", "task")
    }
    arrays["valid"] = ArraySpec(shape=(), dtype="bool")
    if "hidden" in manifest.kinds:
        bfloat16 = manifest.dtype == "bfloat16"
        hidden = ArraySpec(
            shape=(manifest.vectors, manifest.dim),
            dtype=storage_dtype(manifest.dtype),
            attributes={"craft_dtype": "bfloat16"} if bfloat16 else {},
        )
        arrays |= {f"hidden/{name}": hidden for name in layer_names(manifest)}
        arrays["hidden_mask"] = ArraySpec(shape=(manifest.vectors,), dtype="bool")
    return arrays


def row_files(
    root: Path, manifest: Manifest, specs: Mapping[str, ArraySpec]
) -> dict[str, ChunkFiles]:
    """Where the cache at `root` keeps its arrays with a row axis."""
    rows, chunk_rows = manifest.rows, manifest.rows_per_chunk
    return {
        name: ChunkFiles(root=root, name=name, rows=rows, chunk_rows=chunk_rows, spec=spec)
        for name, spec in specs.items()
    }


def commit_files(root: Path, manifest: Manifest) -> ChunkFiles:
    """Where the cache at `root` keeps the commit records of its chunks."""
    record = ArraySpec(shape=(), dtype="uint32")
    rows = manifest.chunk_count
    return ChunkFiles(root=root, name="commit", rows=rows, chunk_rows=1, spec=record)


def stats_files(root: Path, manifest: Manifest, layer: str) -> dict[str, ChunkFiles]:
    """Where the cache at `root` keeps a layer's mean, variance and count, each in one chunk."""
    moments = ArraySpec(shape=(manifest.dim,), dtype="float64")
    specs = {"mean": moments, "variance": moments, "count": ArraySpec(shape=(), dtype="int64")}
    rows = manifest.vectors
    return {
        entry: ChunkFiles(
            root=root, name=f"stats/{layer}/{entry}", rows=rows, chunk_rows=rows, spec=spec
        )
        for entry, spec in specs.items()
    }


def create_group(
    folder: Path, manifest: Manifest, specs: Mapping[str, ArraySpec], tasks: Sequence[str]
) -> zarr.Group:
    """Make the group of a cache with its attributes, without arrays."""
    attributes = {
        "craft": manifest.to_json(),
        "arrays": {name: spec.to_json() for name, spec in specs.items()},
        "tasks": list(tasks),
    }
    attributes["digest"] = attributes_digest(attributes)
    # The mark goes in with the group itself, so that a killed build is known as ours.
    return zarr.create_group(folder, zarr_format=3, attributes=attributes)


def create_array(group: zarr.Group, files: ChunkFiles) -> zarr.Array[Any]:
    """Make the array that writes those chunk files."""
    return group.create_array(
        files.name,
        shape=files.shape,
        chunks=files.chunk_shape,
        dtype=files.spec.dtype,
        filters=None,
        compressors=Crc32cCodec(),
        fill_value=0,
        attributes=files.spec.attributes,
        # Without it a chunk of zeros has no file, and cannot be told from a lost one.
        config={"write_empty_chunks": True},
    )


def open_to_write(
    folder: Path, arrays: Iterable[ChunkFiles]
) -> tuple[zarr.Group, dict[str, zarr.Array[Any]]]:
    """Open an unfinished cache and those arrays of it, as `create_array` made them.

    Raises:
        CraftError: an array is missing or has other metadata.
    """
    # Not part of an array's metadata, so that it is to be said again.
    with zarr.config.set({"array.write_empty_chunks": True}):
        group = zarr.open_group(folder, mode="r+", zarr_format=3)
        return group, {files.name: _check_array(folder, group, files) for files in arrays}


def attributes_digest(attributes: Mapping[str, Any]) -> str:
    """Digest of what a cache says of itself; whether it is complete is left to change."""
    manifest = {k: v for k, v in attributes["craft"].items() if k != "complete"}
    said = [manifest, attributes["arrays"], attributes["tasks"]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def update_manifest(group: zarr.Group, manifest: Manifest) -> None:
    """Replace the manifest of a cache."""
    group.update_attributes({"craft": manifest.to_json()})


def metadata_files(root: Path, names: Iterable[str]) -> list[Path]:
    """Zarr's metadata of the group at `root`, of its arrays `names` and of the groups between."""
    folders = {root}
    for name in names:
        folder = root / name
        while folder != root:
            folders.add(folder)
            folder = folder.parent
    return [folder / "zarr.json" for folder in sorted(folders)]


def open_cache(path: Path) -> OpenedCache:
    """Open a cache, or say what is wrong with it.

    Raises:
        CraftError: there is no complete cache, or its metadata is not what craft wrote.
    """
    group = _open_group(path)
    attributes = group.attrs.asdict()
    manifest = _read_manifest(path, attributes)
    specs = _read_specs(path, attributes.get("arrays"))
    tasks = attributes.get("tasks")
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise _broken(path, 'the group attribute "tasks" is not a list of strings')
    for name, spec in required_arrays(manifest).items():
        if name not in specs:
            raise _broken(path, f"array {name} is missing")
        if specs[name] != spec:
            raise _broken(path, f"array {name} is not what the manifest says")
    arrays = [*row_files(path, manifest, specs).values(), commit_files(path, manifest)]
    for layer in layer_names(manifest) if "hidden" in manifest.kinds else []:
        arrays += stats_files(path, manifest, layer).values()
    for files in arrays:
        _check_array(path, group, files)
    # Last, because the checks before it can say what is wrong, and this one only that something is.
    if attributes.get("digest") != attributes_digest(attributes):
        raise _broken(path, "the manifest, the arrays or the tasks are not those that were written")
    return OpenedCache(
        manifest=manifest,
        tasks=tuple(tasks),
        specs=specs,
        files={files.name: files for files in arrays},
    )


def _open_group(path: Path) -> zarr.Group:
    if not path.is_dir():
        raise missing_cache(path)
    try:
        return zarr.open_group(path, mode="r", zarr_format=3)
    # Zarr raises a different error for each way the metadata can be absent or malformed.
    except Exception as error:
        raise CraftError(
            f"{path} is not a craft cache.",
            why=f"the folder is not a Zarr v3 group that can be read ({_brief(error)}).",
            fix="give the folder that craft cache build wrote.",
        ) from error


def _read_manifest(path: Path, attributes: Mapping[str, Any]) -> Manifest:
    if "craft" not in attributes:
        raise CraftError(
            f"{path} is not a craft cache.",
            why='it is a Zarr group without the attribute "craft".',
            fix="give the folder that craft cache build wrote.",
        )
    manifest = Manifest.from_json(attributes["craft"])
    if not manifest.complete:
        raise CraftError(
            f"Cache {path} is incomplete.",
            why="its build did not finish.",
            fix="rebuild it with craft cache build --overwrite.",
        )
    return manifest


def _read_specs(path: Path, data: Any) -> dict[str, ArraySpec]:
    try:
        return {
            name: ArraySpec(
                shape=tuple(map(int, entry["shape"])),
                dtype=entry["dtype"],
                attributes=dict(entry["attributes"]),
            )
            for name, entry in data.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _broken(path, f'the group attribute "arrays" is malformed ({error!r})') from error


def _check_array(path: Path, group: zarr.Group, files: ChunkFiles) -> zarr.Array[Any]:
    """The array of those chunk files; refuse one whose metadata does not describe them."""
    name, spec = files.name, files.spec
    try:
        array = group[name]
    except KeyError as error:
        raise _broken(path, f"array {name} is missing") from error
    # As for the group: the errors for malformed metadata are many.
    except Exception as error:
        raise _broken(path, f"the metadata of {name} cannot be read ({_brief(error)})") from error
    if not isinstance(array, zarr.Array):
        raise _broken(path, f"array {name} is missing, there is a group of that name")
    if array.shape != files.shape:
        raise _broken(path, f"array {name} has the shape {array.shape}, not {files.shape}")
    if array.chunks != files.chunk_shape or array.shards is not None:
        raise _broken(path, f"array {name} has chunks of {array.chunks}, not {files.chunk_shape}")
    if array.dtype != np.dtype(spec.dtype) or array.attrs.asdict() != spec.attributes:
        raise _broken(path, f"array {name} is {array.dtype} {array.attrs.asdict()}, not {spec}")
    _check_encoding(path, array, files)
    return array


def _check_encoding(path: Path, array: zarr.Array[Any], files: ChunkFiles) -> None:
    """Rows are read past zarr, which is right only for plain bytes under the default key."""
    metadata, name = array.metadata, files.name
    codecs = [codec.to_dict() for codec in metadata.codecs] if metadata.zarr_format == 3 else []
    names = [codec["name"] for codec in codecs]
    if names != ["bytes", "crc32c"] or "big" in str(codecs[0].get("configuration")):
        raise _broken(path, f"array {name} is encoded by {codecs}, not little-endian bytes, crc32c")
    key = metadata.encode_chunk_key((0,) * len(array.shape))
    if files.folder / key != files.file(0):
        raise _broken(path, f"array {name} names its chunks another way, as in {key}")


def _broken(path: Path, problem: str) -> CraftError:
    return CraftError(
        f"Cache {path} is damaged.",
        why=f"{problem}.",
        fix="restore it from a copy, or rebuild it with craft cache build --overwrite.",
    )


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
