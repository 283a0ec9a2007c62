"""Everything zarr: how a cache's group and arrays are made, opened and checked.

With `remote`, the one module that imports zarr. `writer` writes rows through the arrays it makes,
`reader` reads them past zarr once their metadata is checked, unless somebody encoded them anew.
`format` describes the arrays.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec

from craftcli.cache.chunks import ArraySpec, Chunks, DamagedChunkError
from craftcli.cache.dtypes import storage_dtype
from craftcli.cache.folders import Folder
from craftcli.cache.format import Manifest, layer_names
from craftcli.cache.places import missing_cache
from craftcli.cache.sites import open_folder
from craftcli.cache.whole_chunks import DecodedChunks
from craftcli.errors import CraftError
from craftcli.locations import Location, RemotePath


@dataclass(frozen=True, kw_only=True)
class OpenedCache:
    """A complete cache whose metadata was checked; its chunks were not."""

    manifest: Manifest
    """What the cache says of itself."""
    tasks: tuple[str, ...]
    """Task strings that index/task points into."""
    specs: dict[str, ArraySpec]
    """The arrays with a row axis."""
    chunks: dict[str, Chunks]
    """Chunks of every array, `commit` and `stats/` included."""
    folder: Folder
    """Where it is."""


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


def row_chunks(
    folder: Folder, manifest: Manifest, specs: Mapping[str, ArraySpec]
) -> dict[str, Chunks]:
    """Where the cache in a folder keeps its arrays with a row axis."""
    rows, chunk_rows = manifest.rows, manifest.rows_per_chunk
    return {name: folder.chunks(name, rows, chunk_rows, spec) for name, spec in specs.items()}


def commit_chunks(folder: Folder, manifest: Manifest) -> Chunks:
    """Where the cache in a folder keeps the commit records of its chunks."""
    return folder.chunks("commit", manifest.chunk_count, 1, ArraySpec(shape=(), dtype="uint32"))


def stats_chunks(folder: Folder, manifest: Manifest, layer: str) -> dict[str, Chunks]:
    """Where the cache in a folder keeps a layer's mean, variance and count, each in one chunk."""
    moments = ArraySpec(shape=(manifest.dim,), dtype="float64")
    specs = {"mean": moments, "variance": moments, "count": ArraySpec(shape=(), dtype="int64")}
    rows = manifest.vectors
    return {
        entry: folder.chunks(f"stats/{layer}/{entry}", rows, rows, spec)
        for entry, spec in specs.items()
    }


def create_group(
    folder: Folder, manifest: Manifest, specs: Mapping[str, ArraySpec], tasks: Sequence[str]
) -> zarr.Group:
    """Make the group of a cache with its attributes, without arrays."""
    attributes = {
        "craft": manifest.to_json(),
        "arrays": {name: spec.to_json() for name, spec in specs.items()},
        "tasks": list(tasks),
    }
    attributes["digest"] = attributes_digest(attributes)
    # The mark goes in with the group itself, so that a killed build is known as ours.
    return zarr.create_group(folder.store, zarr_format=3, attributes=attributes)


def create_array(group: zarr.Group, chunks: Chunks) -> zarr.Array[Any]:
    """Make the array that writes those chunks."""
    return group.create_array(
        chunks.name,
        shape=chunks.shape,
        chunks=chunks.chunk_shape,
        dtype=chunks.spec.dtype,
        filters=None,
        compressors=Crc32cCodec(),
        fill_value=0,
        attributes=chunks.spec.attributes,
        # Without it a chunk of zeros has no file, and cannot be told from a lost one.
        config={"write_empty_chunks": True},
    )


def open_to_write(
    folder: Folder, arrays: Iterable[Chunks]
) -> tuple[zarr.Group, dict[str, zarr.Array[Any]]]:
    """Open an unfinished cache and those arrays of it, as `create_array` made them.

    Raises:
        CraftError: an array is missing or has other metadata.
    """
    # Not part of an array's metadata, so that it is to be said again.
    with folder.guard(), zarr.config.set({"array.write_empty_chunks": True}):
        group = zarr.open_group(folder.store, mode="r+", zarr_format=3)
        opened = {chunks.name: _check_array(folder, group, chunks) for chunks in arrays}
    for name, array in opened.items():
        if not _is_plain(array):
            raise _broken(folder, f"array {name} is encoded by {_codecs(array)}")
    return group, opened


def read_attributes(folder: Folder) -> dict[str, Any] | None:
    """The attributes of the Zarr group in a folder; None if there is none that can be read."""
    try:
        metadata = json.loads(folder.read("zarr.json") or b"null")
    except (OSError, ValueError):
        return None
    attributes = metadata.get("attributes") if isinstance(metadata, dict) else None
    return attributes if isinstance(attributes, dict) else None


def attributes_digest(attributes: Mapping[str, Any]) -> str:
    """Digest of what a cache says of itself; whether it is complete is left to change."""
    manifest = {k: v for k, v in attributes["craft"].items() if k != "complete"}
    said = [manifest, attributes["arrays"], attributes["tasks"]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def update_manifest(group: zarr.Group, manifest: Manifest) -> None:
    """Replace the manifest of a cache."""
    group.update_attributes({"craft": manifest.to_json()})


def metadata_files(names: Iterable[str]) -> list[str]:
    """Zarr's metadata of a cache, of its arrays `names` and of the groups between."""
    parts = {""}
    for name in names:
        while name:
            parts.add(f"{name}/")
            name = name.rpartition("/")[0]
    return [f"{part}zarr.json" for part in sorted(parts)]


def open_cache(path: str | Location) -> OpenedCache:
    """Open a cache, or say what is wrong with it.

    Raises:
        CraftError: there is no complete cache, or its metadata is not what craft wrote.
    """
    folder = open_folder(path)
    with folder.guard():
        return _open(folder)


def _open(folder: Folder) -> OpenedCache:
    group = _open_group(folder)
    attributes = group.attrs.asdict()
    manifest = _read_manifest(folder, attributes)
    specs = _read_specs(folder, attributes.get("arrays"))
    tasks = attributes.get("tasks")
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise _broken(folder, 'the group attribute "tasks" is not a list of strings')
    for name, spec in required_arrays(manifest).items():
        if name not in specs:
            raise _broken(folder, f"array {name} is missing")
        if specs[name] != spec:
            raise _broken(folder, f"array {name} is not what the manifest says")
    arrays = [*row_chunks(folder, manifest, specs).values(), commit_chunks(folder, manifest)]
    for layer in layer_names(manifest) if "hidden" in manifest.kinds else []:
        arrays += stats_chunks(folder, manifest, layer).values()
    opened = [_readable(folder, _check_array(folder, group, chunks), chunks) for chunks in arrays]
    # Last, because the checks before it can say what is wrong, and this one only that something is.
    if attributes.get("digest") != attributes_digest(attributes):
        raise _broken(
            folder, "the manifest, the arrays or the tasks are not those that were written"
        )
    return OpenedCache(
        manifest=manifest,
        tasks=tuple(tasks),
        specs=specs,
        chunks={chunks.name: chunks for chunks in opened},
        folder=folder,
    )


def _open_group(folder: Folder) -> zarr.Group:
    path = folder.path
    if isinstance(path, RemotePath):
        if folder.read("zarr.json") is None:
            raise CraftError(
                f"No cache at {path}.",
                why="nothing is there.",
                fix="check the URL, or make one with craft cache build.",
            )
    elif not path.is_dir():
        raise missing_cache(path)
    try:
        with folder.guard():
            return zarr.open_group(folder.store, mode="r", zarr_format=3)
    except CraftError:
        raise
    # Zarr raises a different error for each way the metadata can be absent or malformed.
    except Exception as error:
        raise CraftError(
            f"{path} is not a craft cache.",
            why=f"it is not a Zarr v3 group that can be read ({_brief(error)}).",
            fix="give what craft cache build wrote.",
        ) from error


def _read_manifest(folder: Folder, attributes: Mapping[str, Any]) -> Manifest:
    if "craft" not in attributes:
        raise CraftError(
            f"{folder.path} is not a craft cache.",
            why='it is a Zarr group without the attribute "craft".',
            fix="give the folder that craft cache build wrote.",
        )
    manifest = Manifest.from_json(attributes["craft"])
    if not manifest.complete:
        raise CraftError(
            f"Cache {folder.path} is incomplete.",
            why="its build did not finish.",
            fix="go on with craft cache build --resume, or start anew with --overwrite."
            if isinstance(folder.path, RemotePath)
            else "rebuild it with craft cache build --overwrite.",
        )
    return manifest


def _read_specs(folder: Folder, data: Any) -> dict[str, ArraySpec]:
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
        raise _broken(folder, f'the group attribute "arrays" is malformed ({error!r})') from error


def _check_array(folder: Folder, group: zarr.Group, chunks: Chunks) -> zarr.Array[Any]:
    """The array of those chunks; refuse one whose metadata does not describe them."""
    name, spec = chunks.name, chunks.spec
    try:
        with folder.guard():
            array = group[name]
    except CraftError:
        raise
    except KeyError as error:
        raise _broken(folder, f"array {name} is missing") from error
    # As for the group: the errors for malformed metadata are many.
    except Exception as error:
        problem = f"the metadata of {name} cannot be read ({_brief(error)})"
        raise _broken(folder, problem) from error
    if not isinstance(array, zarr.Array):
        raise _broken(folder, f"array {name} is missing, there is a group of that name")
    if array.shape != chunks.shape:
        raise _broken(folder, f"array {name} has the shape {array.shape}, not {chunks.shape}")
    if array.chunks != chunks.chunk_shape or array.shards is not None:
        found = f"{array.chunks}, not {chunks.chunk_shape}"
        raise _broken(folder, f"array {name} has chunks of {found}")
    if array.dtype != np.dtype(spec.dtype) or array.attrs.asdict() != spec.attributes:
        raise _broken(folder, f"array {name} is {array.dtype} {array.attrs.asdict()}, not {spec}")
    return array


def _readable(folder: Folder, array: zarr.Array[Any], chunks: Chunks) -> Chunks:
    """The chunks past zarr if they are raw rows, else through it."""
    if _is_plain(array) and f"{chunks.name}/{_key(array, 0)}" == chunks.key(0):
        return chunks
    # No commit record vouches for the statistics.
    unsealed = chunks.name.startswith("stats/")
    if unsealed and not any(codec["name"] == "crc32c" for codec in _codecs(array)):
        raise _broken(folder, f"array {chunks.name} is encoded without crc32c")

    def decode(chunk: int) -> Any:
        first = chunk * chunks.chunk_rows
        try:
            with folder.guard():
                # Zarr leaves out chunks of zeros, and takes what was lost for such a one.
                if unsealed and folder.read(f"{chunks.name}/{_key(array, chunk)}") is None:
                    chunks.fail(chunk, "it is missing")
                return array[first : first + chunks.chunk_rows]
        except (CraftError, DamagedChunkError):
            raise
        # Every codec has errors of its own.
        except Exception as error:
            chunks.fail(chunk, f"it cannot be decoded ({_brief(error)})")

    return DecodedChunks(
        name=chunks.name,
        rows=chunks.rows,
        chunk_rows=chunks.chunk_rows,
        spec=chunks.spec,
        decode=decode,
    )


def _is_plain(array: zarr.Array[Any]) -> bool:
    """Whether chunks are little-endian rows and their crc32c, and nothing else."""
    codecs = _codecs(array)
    names = [codec["name"] for codec in codecs]
    return names == ["bytes", "crc32c"] and "big" not in str(codecs[0].get("configuration"))


def _codecs(array: zarr.Array[Any]) -> list[dict[str, Any]]:
    """What an array is encoded by; Zarr's second version has no such list."""
    metadata = array.metadata
    return [codec.to_dict() for codec in metadata.codecs] if metadata.zarr_format == 3 else []


def _key(array: zarr.Array[Any], chunk: int) -> str:
    return array.metadata.encode_chunk_key((chunk, *(0 for _ in array.shape[1:])))


def _broken(folder: Folder, problem: str) -> CraftError:
    return CraftError(
        f"Cache {folder.path} is damaged.",
        why=f"{problem}.",
        fix="restore it from a copy, or rebuild it with craft cache build --overwrite.",
    )


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
