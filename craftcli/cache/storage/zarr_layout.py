"""How a cache's Zarr group and arrays are created, opened and checked; `format` describes them.

Only this module and `remote_folder` import zarr. `writing` writes rows through zarr's arrays.
`reading` checks their metadata here and then reads the chunks without zarr, unless somebody encoded
them anew.
"""

import asyncio
import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec
from zarr.core.sync import sync

from craftcli.cache.dtypes import storage_dtype
from craftcli.cache.format import LONGEST_TASK, METADATA_BYTES, Manifest, layer_names
from craftcli.cache.storage.base import CacheFolder
from craftcli.cache.storage.by_location import open_folder
from craftcli.cache.storage.chunks import ArraySpec, Chunks, DamagedChunkError
from craftcli.cache.storage.local_destination import missing_cache_error
from craftcli.cache.storage.packed_chunks import PackedChunks
from craftcli.cache.storage.whole_chunks import DecodedChunks
from craftcli.errors import CraftError
from craftcli.locations import Location, RemotePath

_WRITES_END_S = 10.0
_SHOWN = 200
"""Characters of metadata in an error."""


@dataclass(frozen=True, kw_only=True)
class OpenedCache:
    """A complete cache with checked metadata; its chunks are not checked yet."""

    manifest: Manifest
    """The manifest of the cache."""
    tasks: tuple[str, ...]
    """Task strings that index/task points into."""
    specs: dict[str, ArraySpec]
    """The arrays with a row axis."""
    chunks: dict[str, Chunks]
    """Chunks of every array, `commit` and `stats/` included."""
    folder: CacheFolder
    """Where it is."""


def required_arrays(manifest: Manifest) -> dict[str, ArraySpec]:
    """The arrays of every cache with this manifest; it may have inputs and outputs as well."""
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
    folder: CacheFolder, manifest: Manifest, specs: Mapping[str, ArraySpec]
) -> dict[str, Chunks]:
    """The chunks of the arrays with a row axis."""
    rows, chunk_rows, packed = manifest.rows, manifest.rows_per_chunk, manifest.packed or ()
    return {
        name: folder.chunks(name, rows, chunk_rows, spec, packed=name in packed)
        for name, spec in specs.items()
    }


def commit_chunks(folder: CacheFolder, manifest: Manifest) -> Chunks:
    """The chunks of the commit records: one record a chunk."""
    return folder.chunks("commit", manifest.chunk_count, 1, ArraySpec(shape=(), dtype="uint32"))


def stats_chunks(folder: CacheFolder, manifest: Manifest, layer: str) -> dict[str, Chunks]:
    """The chunks of a layer's mean, variance and count, one chunk each.

    Those of a packed layer are packed too: a slot that no row fills has no mean.
    """
    moments = ArraySpec(shape=(manifest.dim,), dtype="float64")
    specs = {"mean": moments, "variance": moments, "count": ArraySpec(shape=(), dtype="int64")}
    rows, packed = manifest.vectors, f"hidden/{layer}" in (manifest.packed or ())
    return {
        entry: folder.chunks(
            f"stats/{layer}/{entry}", rows, rows, spec, packed=packed and bool(spec.shape)
        )
        for entry, spec in specs.items()
    }


def create_group(
    folder: CacheFolder, manifest: Manifest, specs: Mapping[str, ArraySpec], tasks: Sequence[str]
) -> zarr.Group:
    """Create the group of a cache with its attributes, without arrays."""
    attributes = {
        "craft": manifest.to_json(),
        "arrays": {name: spec.to_json() for name, spec in specs.items()},
        "tasks": list(tasks),
    }
    attributes["digest"] = attributes_digest(attributes)
    # The attributes are written with the group itself, so that a killed build is known as craft's.
    return zarr.create_group(folder.store, zarr_format=3, attributes=attributes)


def create_array(group: zarr.Group, chunks: Chunks) -> zarr.Array[Any]:
    """Create the array that writes these chunks."""
    with _without_advice():
        return group.create_array(
            chunks.name,
            shape=chunks.shape,
            chunks=chunks.chunk_shape,
            dtype=chunks.spec.dtype,
            filters=None,
            serializer=_serializer(chunks),
            compressors=Crc32cCodec(),
            fill_value=0,
            attributes=chunks.spec.attributes,
            # Without it a chunk of zeros has no file and looks like a lost one.
            config={"write_empty_chunks": True},
        )


def open_to_write(
    folder: CacheFolder, arrays: Iterable[Chunks]
) -> tuple[zarr.Group, dict[str, zarr.Array[Any]]]:
    """Open an unfinished cache and these arrays of it, as `create_array` created them.

    Raises:
        CraftError: an array is missing or has other metadata.
    """
    by_name = {chunks.name: chunks for chunks in arrays}
    # The setting is not part of an array's metadata, and has to be given again.
    with folder.explain_errors(), zarr.config.set({"array.write_empty_chunks": True}):
        group = zarr.open_group(folder.store, mode="r+", zarr_format=3)
        opened = {name: _check_array(folder, group, each) for name, each in by_name.items()}
    for name, array in opened.items():
        if not _is_as_written(array, by_name[name]):
            raise _broken(folder, f"array {name} is encoded by {_codecs(array)}")
    return group, opened


def read_attributes(folder: CacheFolder) -> dict[str, Any] | None:
    """The attributes of the Zarr group in a folder; None if there is none that can be read."""
    try:
        metadata = json.loads(folder.read("zarr.json") or b"null")
    except (OSError, ValueError):
        return None
    attributes = metadata.get("attributes") if isinstance(metadata, dict) else None
    return attributes if isinstance(attributes, dict) else None


def attributes_digest(attributes: Mapping[str, Any]) -> str:
    """Digest of the manifest, the arrays and the tasks; the field `complete` may change."""
    manifest = {k: v for k, v in attributes["craft"].items() if k != "complete"}
    content = [manifest, attributes["arrays"], attributes["tasks"]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def update_manifest(group: zarr.Group, manifest: Manifest) -> None:
    """Replace the manifest of a cache, and the digest over it, in one write."""
    attributes = {**group.attrs.asdict(), "craft": manifest.to_json()}
    group.update_attributes({**attributes, "digest": attributes_digest(attributes)})


def wait_for_writes() -> None:
    """Return when zarr's own thread writes nothing any more.

    It continues after Ctrl-C has stopped the function that waited for it, and would create files in
    a folder that was just removed.
    """

    async def wait() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    # A store that does not answer must not hold up the end of the program.
    with contextlib.suppress(TimeoutError):
        sync(wait(), timeout=_WRITES_END_S)


def metadata_files(names: Iterable[str]) -> list[str]:
    """Zarr's metadata files of a cache, of its arrays `names` and of the groups between."""
    parts = {""}
    for name in names:
        while name:
            parts.add(f"{name}/")
            name = name.rpartition("/")[0]
    return [f"{part}zarr.json" for part in sorted(parts)]


def open_cache(path: str | Location) -> OpenedCache:
    """Open a complete cache and check its metadata.

    Raises:
        CraftError: there is no complete cache, or its metadata is not what craft wrote.
    """
    folder = open_folder(path)
    with folder.explain_errors():
        return _open(folder)


def _open(folder: CacheFolder) -> OpenedCache:
    group = _open_group(folder)
    attributes = group.attrs.asdict()
    manifest = _read_manifest(folder, attributes)
    specs = _read_specs(folder, attributes.get("arrays"))
    tasks = attributes.get("tasks")
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise _broken(folder, 'the group attribute "tasks" is not a list of strings')
    if any(len(task) > LONGEST_TASK for task in tasks):
        raise _broken(folder, f"a task has more than {LONGEST_TASK} characters")
    for name, spec in required_arrays(manifest).items():
        if name not in specs:
            raise _broken(folder, f"array {name} is missing")
        if specs[name] != spec:
            raise _broken(folder, f"array {name} does not match the manifest")
    if unknown := sorted(set(manifest.packed or ()) - specs.keys()):
        raise _broken(folder, f"array {unknown[0]} is missing")
    arrays = [*row_chunks(folder, manifest, specs).values(), commit_chunks(folder, manifest)]
    for layer in layer_names(manifest) if "hidden" in manifest.kinds else []:
        arrays += stats_chunks(folder, manifest, layer).values()
    opened = [_readable(folder, _check_array(folder, group, chunks), chunks) for chunks in arrays]
    # Last, because the checks before it name the problem, and this one cannot.
    if attributes.get("digest") != attributes_digest(attributes):
        raise _broken(folder, "the manifest, the arrays or the tasks were changed after the build")
    return OpenedCache(
        manifest=manifest,
        tasks=tuple(tasks),
        specs=specs,
        chunks={chunks.name: chunks for chunks in opened},
        folder=folder,
    )


def _open_group(folder: CacheFolder) -> zarr.Group:
    path = folder.path
    if isinstance(path, Path) and not path.is_dir():
        raise missing_cache_error(path)
    size = folder.file_size("zarr.json")
    if size is None and isinstance(path, RemotePath):
        raise CraftError(
            f"No cache at {path}.",
            why="nothing is there.",
            fix="check the URL, or make one with craft cache build.",
        )
    if size is not None and size > METADATA_BYTES:
        raise _broken(folder, f"its zarr.json has {size} bytes, more than {METADATA_BYTES}")
    try:
        with folder.explain_errors():
            return zarr.open_group(folder.store, mode="r", zarr_format=3)
    except CraftError:
        raise
    # Zarr raises a different error for each way the metadata can be absent or malformed.
    except Exception as error:
        raise CraftError(
            f"{path} is not a craft cache.",
            why=f"it is not a Zarr v3 group that can be read ({_brief(error)}).",
            fix="give a folder that craft cache build wrote.",
        ) from error


def _read_manifest(folder: CacheFolder, attributes: Mapping[str, Any]) -> Manifest:
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
            fix="continue it with craft cache build --resume, or start anew with --overwrite."
            if isinstance(folder.path, RemotePath)
            else "rebuild it with craft cache build --overwrite.",
        )
    return manifest


def _read_specs(folder: CacheFolder, data: Any) -> dict[str, ArraySpec]:
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
        raise _broken(
            folder, f'the group attribute "arrays" is malformed ({_brief(error)})'
        ) from error


def _check_array(folder: CacheFolder, group: zarr.Group, chunks: Chunks) -> zarr.Array[Any]:
    """Open the array of these chunks; refuse it if its metadata does not describe them."""
    name, spec = chunks.name, chunks.spec
    try:
        with folder.explain_errors(), _without_advice():
            array = group[name]
    except CraftError:
        raise
    except KeyError as error:
        raise _broken(folder, f"array {name} is missing") from error
    # As for the group: zarr raises many kinds of errors for malformed metadata.
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
        found = str(array.attrs.asdict())[:_SHOWN]
        raise _broken(folder, f"array {name} is {array.dtype} {found}, not {spec}")
    return array


def _readable(folder: CacheFolder, array: zarr.Array[Any], chunks: Chunks) -> Chunks:
    """The chunks themselves if they are as craft writes them, else chunks that zarr decodes."""
    if _is_as_written(array, chunks) and f"{chunks.name}/{_key(array, 0)}" == chunks.key(0):
        return chunks
    # No commit record vouches for the statistics.
    without_record = chunks.name.startswith("stats/")
    if without_record and not any(codec["name"] == "crc32c" for codec in _codecs(array)):
        raise _broken(folder, f"array {chunks.name} is encoded without crc32c")

    def decode(chunk: int) -> Any:
        first = chunk * chunks.chunk_rows
        try:
            with folder.explain_errors():
                # Zarr reads a missing chunk as zeros.
                if without_record and folder.read(f"{chunks.name}/{_key(array, chunk)}") is None:
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
        written=chunks,
        decode=decode,
    )


def _serializer(chunks: Chunks) -> BytesCodec | ShardingCodec:
    """The codec that turns rows into bytes, before their crc32c."""
    if isinstance(chunks, PackedChunks):
        return ShardingCodec(chunk_shape=chunks.piece, codecs=[BytesCodec()])
    return BytesCodec()


def _is_as_written(array: zarr.Array[Any], chunks: Chunks) -> bool:
    """Whether chunks are little-endian rows, packed or not, and their crc32c, and nothing else."""
    codecs = _codecs(array)
    if isinstance(chunks, PackedChunks):
        return codecs == [_serializer(chunks).to_dict(), Crc32cCodec().to_dict()]
    names = [codec["name"] for codec in codecs]
    return names == ["bytes", "crc32c"] and "big" not in str(codecs[0].get("configuration"))


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Ignore zarr's advice against a crc32c after packed rows: craft reads those chunks itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Combining a `sharding_indexed` codec")
        yield


def _codecs(array: zarr.Array[Any]) -> list[dict[str, Any]]:
    """The codecs of an array; arrays of Zarr version 2 have no such list."""
    metadata = array.metadata
    return [codec.to_dict() for codec in metadata.codecs] if metadata.zarr_format == 3 else []


def _key(array: zarr.Array[Any], chunk: int) -> str:
    return array.metadata.encode_chunk_key((chunk, *(0 for _ in array.shape[1:])))


def _broken(folder: CacheFolder, problem: str) -> CraftError:
    return CraftError(
        f"Cache {folder.path} is damaged.",
        why=f"{problem}.",
        fix="restore it from a copy, or rebuild it with craft cache build --overwrite.",
    )


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0][:_SHOWN] if str(error) else type(error).__name__
