"""Writing and reading the cache file; the one module that imports zarr.

Zarr makes the files, and zarr's metadata says how they look. Rows are read past the zarr API:
a chunk file is raw rows and a checksum, so it is mapped into memory and checked at its first touch,
which makes a random batch hundreds of times cheaper than through the API. `format` describes the
arrays.
"""

import contextlib
import difflib
import errno
import functools
import json
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Never, Self

import google_crc32c
import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import Crc32cCodec

from craftcli.cache.dtypes import decode, is_finite, storage_dtype
from craftcli.cache.format import Manifest, layer_names
from craftcli.cache.stats import LayerStats, Moments
from craftcli.errors import CraftError

_CRC_BYTES = 4
# Linux allows a process 65530 mappings by default, and torch needs some of them.
_MAX_MAPPINGS = 16384
_REBUILD = "rebuild it with craft cache build --overwrite; craft cache inspect --verify lists all."


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """What one row of an array looks like."""

    shape: tuple[int, ...]
    """Shape of a row: the array's without the row axis."""
    dtype: str
    """Numpy dtype on disk."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Zarr attributes of the array; `craft_dtype` tells bfloat16 from uint16."""

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "biuf" or any(size < 1 for size in self.shape):
            raise ValueError(f"rows of {dtype} {self.shape} are not numbers on non-empty axes")
        # One spelling, so that specs compare equal whether they were given as "<f4" or "float32".
        object.__setattr__(self, "dtype", dtype.name)

    @property
    def row_bytes(self) -> int:
        """Bytes a row takes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def craft_dtype(self) -> str:
        """The dtype the stored numbers stand for."""
        return str(self.attributes.get("craft_dtype", self.dtype))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"shape": list(self.shape), "dtype": self.dtype, "attributes": self.attributes}


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


def is_craft_cache(path: Path) -> bool:
    """Whether a folder carries craft's mark, complete or not."""
    try:
        metadata = json.loads((path / "zarr.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    attributes = metadata.get("attributes") if isinstance(metadata, dict) else None
    return isinstance(attributes, dict) and isinstance(attributes.get("craft"), dict)


class CacheWriter:
    """Builds a cache beside its final place, and moves it there when it is complete.

    Used as a context manager: leaving it without `finish` removes what was built, and whatever was
    at `path` before stays as it was.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        arrays: Mapping[str, ArraySpec],
        tasks: Sequence[str],
        *,
        overwrite: bool,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._overwrite = overwrite
        self._specs = dict(sorted(arrays.items()))
        self._task_count = len(tasks)
        self._partial = _partial(path)
        self._committed: set[int] = set()
        self._finished = False
        attributes = {
            "craft": manifest.to_json(),
            "arrays": {name: spec.to_json() for name, spec in self._specs.items()},
            "tasks": list(tasks),
        }
        # The mark goes in with the group itself, so that a killed build is known as ours.
        self._group = zarr.create_group(self._partial, zarr_format=3, attributes=attributes)
        rows, chunk_rows = manifest.rows, manifest.rows_per_chunk
        self._arrays = {
            name: _create_array(self._group, name, (rows, *spec.shape), chunk_rows, spec)
            for name, spec in self._specs.items()
        }
        self._commit = _create_array(
            self._group, "commit", (manifest.chunk_count,), 1, ArraySpec(shape=(), dtype="uint32")
        )

    @classmethod
    def create(
        cls,
        path: Path,
        manifest: Manifest,
        arrays: Mapping[str, ArraySpec],
        *,
        tasks: Sequence[str],
        overwrite: bool,
    ) -> Self:
        """Begin a cache of the arrays `<group>/<name>` at `path`; nothing is there until `finish`.

        Raises:
            CraftError: `path` is taken or cannot be written.
            ValueError: `arrays` does not fit the manifest.
        """
        _check_arrays(manifest, arrays)
        # A link is followed, so that the replacement lands on the disk the link points to.
        path = path.resolve() if path.is_symlink() else path.absolute()
        _restore_interrupted_overwrite(path)
        check_destination(path, overwrite=overwrite)
        partial = _partial(path)
        if os.path.lexists(partial):
            _check_leftover(partial)
            _remove(partial)
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise CraftError(
                f"Cannot write {path}.",
                why=f"creating {partial} failed: {error.strerror or error}.",
                fix="choose a folder that you may write to.",
            ) from error
        manifest = replace(manifest, complete=False)
        try:
            with _disk_full(path, manifest, arrays):
                return cls(path, manifest, arrays, tasks, overwrite=overwrite)
        except BaseException:
            _try_remove(partial)
            raise

    def __repr__(self) -> str:
        done = f"{len(self._committed)}/{self.manifest.chunk_count}"
        return f"CacheWriter({str(self.path)!r}, chunks={done}, finished={self._finished})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._finished:
            _try_remove(self._partial)

    def write_chunk(self, chunk: int, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write the rows of one chunk to every array, then the chunk's commit record.

        Raises:
            CraftError: the disk is full, or a valid row has a hidden state that is not finite.
            ValueError: an array is missing, unknown, or of another shape or dtype.
        """
        where = self.manifest.chunk_rows(chunk)
        if chunk in self._committed:
            raise ValueError(f"chunk {chunk} is already committed")
        self._check_rows(where, rows)
        with _disk_full(self.path, self.manifest, self._specs):
            for name, array in self._arrays.items():
                array[where] = rows[name]
            files = [self._files(name).file(chunk) for name in self._specs]
            _sync(self._partial, files)
            self._commit[chunk] = _commit_record(_trailer(file) for file in files)
            _sync(self._partial, [self._commit_files.file(chunk)])
        self._committed.add(chunk)

    def finish(self) -> None:
        """Add the statistics, mark the cache complete and move it to its place."""
        missing = self.manifest.chunk_count - len(self._committed)
        if missing:
            raise ValueError(f"{missing} of {self.manifest.chunk_count} chunks are not written")
        names = [*self._specs, "commit"]
        with _disk_full(self.path, self.manifest, self._specs):
            if "hidden" in self.manifest.kinds:
                for layer in layer_names(self.manifest):
                    names += self._write_stats(layer)
            self.manifest = replace(self.manifest, complete=True)
            self._group.update_attributes({"craft": self.manifest.to_json()})
            _sync(self._partial, _metadata_files(self._partial, names))
        check_destination(self.path, overwrite=self._overwrite)
        _move_into_place(self._partial, self.path)
        self._finished = True

    @property
    def _commit_files(self) -> "_ChunkFiles":
        return _ChunkFiles.of("commit", self._partial, self._commit)

    def _files(self, name: str) -> "_ChunkFiles":
        return _ChunkFiles.of(name, self._partial, self._arrays[name])

    def _check_rows(self, where: slice, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        if rows.keys() != self._specs.keys():
            wrong = sorted(rows.keys() ^ self._specs.keys())
            raise ValueError(f"arrays missing or unknown: {', '.join(wrong)}")
        for name, spec in self._specs.items():
            shape = (where.stop - where.start, *spec.shape)
            if rows[name].shape != shape or rows[name].dtype != np.dtype(spec.dtype):
                got = f"{rows[name].dtype} {rows[name].shape}"
                raise ValueError(f"{name} must be {spec.dtype} {shape}, got {got}")
        valid = rows["valid"]
        tasks = rows["index/task"][valid]
        if ((tasks < 0) | (tasks >= self._task_count)).any():
            raise ValueError(f"index/task goes beyond the {self._task_count} tasks")
        if "hidden" not in self.manifest.kinds:
            return
        targets = rows["hidden_mask"] & valid[:, None]
        for layer in layer_names(self.manifest):
            finite = is_finite(rows[f"hidden/{layer}"], self.manifest.dtype).all(axis=2)
            bad = np.flatnonzero((targets & ~finite).any(axis=1))
            if bad.size:
                raise CraftError(
                    "The teacher's hidden states are not finite.",
                    why=f"row {where.start + bad[0]} of layer {layer} has NaN or infinity.",
                    fix="run the teacher in a wider dtype, or leave such samples out.",
                )

    def _write_stats(self, layer: str) -> list[str]:
        """Reads the layer back, which also proves that what was written can be read."""
        hidden, mask, valid = (
            self._files(name) for name in (f"hidden/{layer}", "hidden_mask", "valid")
        )
        moments = Moments(self.manifest.vectors, self.manifest.dim)
        for chunk in range(self.manifest.chunk_count):
            targets = mask.load(chunk) & valid.load(chunk)[:, None]
            moments.update(decode(hidden.load(chunk), self.manifest.dtype), targets)
        result = moments.result()
        written: list[str] = []
        for name in ("mean", "variance", "count"):
            values: npt.NDArray[Any] = getattr(result, name)
            spec = ArraySpec(shape=values.shape[1:], dtype=str(values.dtype))
            full_name = f"stats/{layer}/{name}"
            array = _create_array(self._group, full_name, values.shape, values.shape[0], spec)
            array[:] = values
            _sync(self._partial, [_ChunkFiles.of(full_name, self._partial, array).file(0)])
            written.append(full_name)
        return written


class CacheReader:
    """Random access to a complete cache; safe to share between threads and with forked workers."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        tasks: tuple[str, ...],
        specs: Mapping[str, ArraySpec],
        files: Mapping[str, "_ChunkFiles"],
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.tasks = tasks
        self._specs = dict(specs)
        self._files = dict(files)
        self._checked: set[tuple[str, int]] = set()
        self._chunk = functools.lru_cache(maxsize=_MAX_MAPPINGS)(self._load_chunk)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a cache, or say what is wrong with it; chunks are checked when they are read."""
        group = _open_group(path)
        attributes = group.attrs.asdict()
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
        specs = _read_specs(path, attributes.get("arrays"))
        tasks = attributes.get("tasks")
        if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
            raise _broken(path, 'the group attribute "tasks" is not a list of strings')
        for name, spec in required_arrays(manifest).items():
            if name not in specs:
                raise _broken(path, f"array {name} is missing")
            if specs[name] != spec:
                raise _broken(path, f"array {name} is not what the manifest says")
        rows, chunk_rows = manifest.rows, manifest.rows_per_chunk
        files = {
            name: _open_array(path, group, name, (rows, *spec.shape), chunk_rows, spec)
            for name, spec in specs.items()
        }
        commit = ArraySpec(shape=(), dtype="uint32")
        files["commit"] = _open_array(path, group, "commit", (manifest.chunk_count,), 1, commit)
        if "hidden" in manifest.kinds:
            for layer in layer_names(manifest):
                files |= _open_stats(path, group, layer, manifest)
        return cls(path, manifest, tuple(tasks), specs, files)

    def __repr__(self) -> str:
        return (
            f"CacheReader({str(self.path)!r}, rows={self.manifest.rows}, arrays={len(self._specs)})"
        )

    def array_names(self) -> list[str]:
        """Names of the arrays with a row axis, sorted."""
        return sorted(self._specs)

    def spec(self, name: str) -> ArraySpec:
        """Row shape and dtype of an array."""
        if name not in self._specs:
            close = difflib.get_close_matches(name, self._specs, n=1, cutoff=0.0)
            raise CraftError(
                f"Cache {self.path} has no array {name}.",
                why=f"it has {', '.join(self.array_names())}.",
                fix=f"ask for {close[0]}, or rebuild the cache for this policy.",
            )
        return self._specs[name]

    def read(self, name: str, rows: npt.NDArray[np.integer[Any]]) -> npt.NDArray[Any]:
        """Copy rows in the order given; a row may come twice.

        Raises:
            CraftError: there is no such array, or a chunk of it is missing or damaged.
            IndexError: a row is negative or beyond the last.
        """
        spec = self.spec(name)
        rows = np.asarray(rows)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise TypeError(f"rows must be a list of integers, got {rows.dtype} {rows.shape}")
        out = np.empty((rows.size, *spec.shape), spec.dtype)
        if not rows.size:
            return out
        wanted: list[int] = rows.tolist()
        if min(wanted) < 0 or max(wanted) >= self.manifest.rows:
            raise IndexError(
                f"rows {min(wanted)}..{max(wanted)} are not in 0..{self.manifest.rows - 1}"
            )
        # Chunks stay mapped: for a batch, joining single rows beats sorting the rows by chunk.
        located = (divmod(row, self.manifest.rows_per_chunk) for row in wanted)
        found = [self._chunk(name, chunk)[at : at + 1] for chunk, at in located]
        return np.concatenate(found, out=out)

    def read_all(self, name: str) -> npt.NDArray[Any]:
        """Copy every row."""
        spec = self.spec(name)
        out = np.empty((self.manifest.rows, *spec.shape), np.dtype(spec.dtype))
        for chunk in range(self.manifest.chunk_count):
            out[self.manifest.chunk_rows(chunk)] = self._chunk(name, chunk)
        return out

    def stats(self, layer: str) -> LayerStats:
        """Statistics of one layer's targets; `layer` is a name from `format.layer_names`."""
        mean, variance, count = (
            self._chunk(f"stats/{layer}/{name}", 0).copy() for name in ("mean", "variance", "count")
        )
        return LayerStats(mean=mean, variance=variance, count=count)

    def size_on_disk(self) -> int:
        """Bytes of all files."""
        return sum(
            (Path(folder) / name).stat().st_size
            for folder, _, names in os.walk(self.path)
            for name in names
        )

    def verify(self) -> list[str]:
        """Read every chunk and check it against its checksum and commit record; the problems."""
        problems: list[str] = []
        for chunk in range(self.manifest.chunk_count):
            damaged = [_damage(self._files[name], chunk) for name in self.array_names()]
            found = [problem for problem in damaged if problem]
            # The record of a chunk with a bad file cannot match; saying so would be noise.
            problems += found or self._commit_problems(chunk)
        stats = [files for name, files in self._files.items() if name.startswith("stats/")]
        problems += [problem for files in stats if (problem := _damage(files, 0))]
        return problems

    def _commit_problems(self, chunk: int) -> list[str]:
        commit = self._files["commit"]
        problem = _damage(commit, chunk)
        if problem:
            return [problem]
        trailers = (_trailer(self._files[name].file(chunk)) for name in self.array_names())
        if int(commit.load(chunk)[0]) == _commit_record(trailers):
            return []
        rows = self.manifest.chunk_rows(chunk)
        return [
            f"commit chunk {chunk} (rows {rows.start} to {rows.stop - 1}): the record does not "
            "match the arrays, of which one was changed or swapped"
        ]

    def _load_chunk(self, name: str, chunk: int) -> npt.NDArray[Any]:
        try:
            values = self._files[name].load(chunk, check=(name, chunk) not in self._checked)
        except _DamagedChunkError as error:
            raise CraftError(
                f"Cache {self.path} is damaged.", why=f"{error}.", fix=_REBUILD
            ) from error
        self._checked.add((name, chunk))
        return values


class _DamagedChunkError(Exception):
    """A chunk file that is missing or not what was written; names array, chunk and rows."""


@dataclass(frozen=True, kw_only=True)
class _ChunkFiles:
    """The chunk files of one array: raw rows, little endian, then their crc32c."""

    name: str
    folder: Path
    rows: int
    chunk_rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, name: str, root: Path, array: zarr.Array[Any]) -> Self:
        return cls(
            name=name,
            folder=root / name,
            rows=array.shape[0],
            chunk_rows=array.chunks[0],
            row_shape=array.shape[1:],
            dtype=np.dtype(array.dtype).newbyteorder("<"),
        )

    def file(self, chunk: int) -> Path:
        """Zarr's default chunk key: c, then the position along each axis."""
        return self.folder.joinpath("c", str(chunk), *("0" for _ in self.row_shape))

    def load(self, chunk: int, *, check: bool = True) -> npt.NDArray[Any]:
        """Map the rows of one chunk, without the padding of the last one."""
        shape = (self.chunk_rows, *self.row_shape)
        expected = int(np.prod(shape)) * self.dtype.itemsize + _CRC_BYTES
        try:
            with self.file(chunk).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected:
                    self._fail(chunk, f"the file has {size} bytes instead of {expected}")
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            self._fail(chunk, "the file is missing")
        except OSError as error:
            self._fail(chunk, f"the file cannot be read ({error.strerror or error})")
        data = np.frombuffer(mapped, np.uint8)
        payload = data[:-_CRC_BYTES]
        if check and _crc32c(payload) != bytes(data[-_CRC_BYTES:]):
            self._fail(chunk, "the checksum does not match")
        filled = min(self.chunk_rows, self.rows - chunk * self.chunk_rows)
        return payload.view(self.dtype).reshape(shape)[:filled]

    def _fail(self, chunk: int, problem: str) -> Never:
        first = chunk * self.chunk_rows
        last = min(first + self.chunk_rows, self.rows) - 1
        raise _DamagedChunkError(f"{self.name} chunk {chunk} (rows {first} to {last}): {problem}")


def _crc32c(payload: npt.NDArray[np.uint8]) -> bytes:
    return int(google_crc32c.value(payload)).to_bytes(_CRC_BYTES, "little")


def _trailer(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(-_CRC_BYTES, os.SEEK_END)
        return opened.read()


def _commit_record(trailers: Iterable[bytes]) -> int:
    # Zero is what a record that was never written reads as.
    return int(google_crc32c.value(b"".join(trailers))) or 1


def _damage(files: _ChunkFiles, chunk: int) -> str | None:
    try:
        files.load(chunk)
    except _DamagedChunkError as error:
        return str(error)
    return None


def _create_array(
    group: zarr.Group, name: str, shape: tuple[int, ...], chunk_rows: int, spec: ArraySpec
) -> zarr.Array[Any]:
    return group.create_array(
        name,
        shape=shape,
        chunks=(chunk_rows, *shape[1:]),
        dtype=spec.dtype,
        filters=None,
        compressors=Crc32cCodec(),
        fill_value=0,
        attributes=spec.attributes,
        # Without it a chunk of zeros has no file, and cannot be told from a lost one.
        config={"write_empty_chunks": True},
    )


def _open_group(path: Path) -> zarr.Group:
    build = "craft cache build"
    if path.is_dir():
        try:
            return zarr.open_group(path, mode="r", zarr_format=3)
        # Zarr raises a different error for each way the metadata can be absent or malformed.
        except Exception as error:
            raise CraftError(
                f"{path} is not a craft cache.",
                why=f"the folder is not a Zarr v3 group that can be read ({_brief(error)}).",
                fix=f"give the folder that {build} wrote.",
            ) from error
    if os.path.lexists(path):
        why = "it is not a folder." if path.exists() else "it is a link to nothing."
        raise CraftError(f"{path} is not a craft cache.", why=why, fix=f"give what {build} wrote.")
    if _aside(path).exists():
        why = f"a build was killed while it replaced the cache; the old one is {_aside(path)}."
        fix = f"rename that to {path.name}, or run {build}."
    elif _partial(path).exists():
        why = f"it is only half-built: a killed or running build left {_partial(path)}."
        fix = f"wait for the build if it is running, else run {build} again."
    else:
        why, fix = "nothing is there.", f"check the path, or make one with {build}."
    raise CraftError(f"No cache at {path}.", why=why, fix=fix)


def _open_array(
    path: Path,
    group: zarr.Group,
    name: str,
    shape: tuple[int, ...],
    chunk_rows: int,
    spec: ArraySpec,
) -> _ChunkFiles:
    try:
        array = group[name]
    except KeyError as error:
        raise _broken(path, f"array {name} is missing") from error
    # As for the group: the errors for malformed metadata are many.
    except Exception as error:
        raise _broken(path, f"the metadata of {name} cannot be read ({_brief(error)})") from error
    if not isinstance(array, zarr.Array):
        raise _broken(path, f"array {name} is missing, there is a group of that name")
    if array.shape != shape:
        raise _broken(path, f"array {name} has the shape {array.shape}, not {shape}")
    chunks = (chunk_rows, *shape[1:])
    if array.chunks != chunks or array.shards is not None:
        raise _broken(path, f"array {name} has chunks of {array.chunks}, not {chunks}")
    if array.dtype != np.dtype(spec.dtype) or array.attrs.asdict() != spec.attributes:
        raise _broken(path, f"array {name} is {array.dtype} {array.attrs.asdict()}, not {spec}")
    _check_encoding(path, name, array)
    return _ChunkFiles.of(name, path, array)


def _check_encoding(path: Path, name: str, array: zarr.Array[Any]) -> None:
    """Rows are read past zarr, which is right only for plain bytes under the default key."""
    files = _ChunkFiles.of(name, path, array)
    metadata = array.metadata
    codecs = [codec.to_dict() for codec in metadata.codecs] if metadata.zarr_format == 3 else []
    names = [codec["name"] for codec in codecs]
    if names != ["bytes", "crc32c"] or "big" in str(codecs[0].get("configuration")):
        raise _broken(path, f"array {name} is encoded by {codecs}, not little-endian bytes, crc32c")
    key = metadata.encode_chunk_key((0,) * len(array.shape))
    if path / name / key != files.file(0):
        raise _broken(path, f"array {name} names its chunks another way, as in {key}")


def _open_stats(
    path: Path, group: zarr.Group, layer: str, manifest: Manifest
) -> dict[str, _ChunkFiles]:
    vectors, dim = manifest.vectors, manifest.dim
    layouts = {
        "mean": ((vectors, dim), "float64"),
        "variance": ((vectors, dim), "float64"),
        "count": ((vectors,), "int64"),
    }
    return {
        (name := f"stats/{layer}/{entry}"): _open_array(
            path, group, name, shape, vectors, ArraySpec(shape=shape[1:], dtype=dtype)
        )
        for entry, (shape, dtype) in layouts.items()
    }


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


def _broken(path: Path, problem: str) -> CraftError:
    return CraftError(
        f"Cache {path} is damaged.",
        why=f"{problem}.",
        fix="restore it from a copy, or rebuild it with craft cache build --overwrite.",
    )


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _check_arrays(manifest: Manifest, arrays: Mapping[str, ArraySpec]) -> None:
    required = required_arrays(manifest)
    problems = [
        f"{name} must be {spec}, got {arrays.get(name)}"
        for name, spec in required.items()
        if arrays.get(name) != spec
    ]
    for name in arrays:
        if name == "commit" or name.startswith("stats/"):
            problems.append(f"{name} is a name craft writes itself")
        if name not in required and name.startswith(("hidden", "index/")):
            problems.append(f"{name} is not in the manifest")
        if any(part in ("", ".", "..") for part in name.split("/")):
            problems.append(f"{name!r} is no array name")
    if problems:
        raise ValueError("; ".join(problems))


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".replaced")


def check_destination(path: Path, *, overwrite: bool) -> None:
    """Refuse a path that holds something, unless it is a cache that may be replaced."""
    if not os.path.lexists(path):
        return
    if not is_craft_cache(path):
        raise CraftError(
            f"{path} exists and is not a craft cache.",
            why="craft replaces nothing but its own caches.",
            fix="choose another path, or move what is there away.",
        )
    if not overwrite:
        raise CraftError(
            f"{path} already exists.",
            why="a cache is not replaced unless you ask for it.",
            fix="pass --overwrite, or choose another path.",
        )


def _check_leftover(folder: Path) -> None:
    """Refuse to remove what a killed build cannot have left at `folder`."""
    if not folder.is_symlink() and folder.is_dir():
        # A build killed in its first or last instant leaves nothing, or zarr's own temporary file.
        blank = all(entry.match("zarr.*.partial") for entry in folder.iterdir())
        if blank or is_craft_cache(folder):
            return
    raise CraftError(
        f"{folder} is in the way.",
        why="builds use that name, and what is there is not a craft cache.",
        fix="move it away, or choose another path.",
    )


def _remove(folder: Path) -> None:
    """Delete a cache, its mark last: if this is killed, what remains is still known as ours."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
    shutil.rmtree(folder)


def _try_remove(folder: Path) -> None:
    # There is a more important error to report, or none; the next build tries again.
    with contextlib.suppress(OSError):
        _remove(folder)


def _restore_interrupted_overwrite(path: Path) -> None:
    """Undo the half of an overwrite that a killed build left behind."""
    aside = _aside(path)
    if not os.path.lexists(aside):
        return
    _check_leftover(aside)
    if os.path.lexists(path) or not is_craft_cache(aside):
        _remove(aside)
    else:
        aside.rename(path)


def _move_into_place(partial: Path, path: Path) -> None:
    aside = _aside(path)
    replaces = os.path.lexists(path)
    if replaces:
        path.rename(aside)
    try:
        partial.rename(path)
    except BaseException:
        if replaces:
            aside.rename(path)
        raise
    _sync_one(path.parent)
    if replaces:
        _try_remove(aside)


@contextlib.contextmanager
def _disk_full(path: Path, manifest: Manifest, arrays: Mapping[str, ArraySpec]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        need = manifest.rows * sum(spec.row_bytes for spec in arrays.values())
        disk = next(folder for folder in path.parents if folder.is_mount())
        raise CraftError(
            f"The disk is full, {path} was not written.",
            why=f"the cache needs {_size(need)} in all; the disk at {disk} has room for "
            f"{_size(shutil.disk_usage(path.parent).free)} more, with the unfinished build on it.",
            fix="free space, choose a path on another disk, or keep fewer samples or layers.",
        ) from error


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e3:.1f} kB"


def _metadata_files(root: Path, names: Iterable[str]) -> list[Path]:
    folders = {root}
    for name in names:
        folder = root / name
        while folder != root:
            folders.add(folder)
            folder = folder.parent
    return [folder / "zarr.json" for folder in sorted(folders)]


def _sync(root: Path, files: Iterable[Path]) -> None:
    """Put files and the folders that lead to them on disk."""
    folders: set[Path] = {root}
    for file in files:
        _sync_one(file)
        folder = file.parent
        while folder not in folders:
            folders.add(folder)
            folder = folder.parent
    for folder in folders:
        _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
