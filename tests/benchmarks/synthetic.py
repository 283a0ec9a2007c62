"""What the cache benchmarks share: synthetic rows, a cache of them, and interleaved timing."""

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from craftcli.cache.format import Manifest, rows_per_chunk
from craftcli.cache.storage.chunks import ArraySpec
from craftcli.cache.storage.zarr_layout import required_arrays
from craftcli.cache.writing.writer import CacheWriter
from craftcli.policies.identity import DatasetIdentity, TeacherIdentity

LAYERS = (16, 17)
Values = npt.NDArray[Any]
_TEACHER = TeacherIdentity(
    source="synthetic",
    revision=None,
    policy_type="pi0_fast",
    weights_digest="w",
    config_digest="c",
    processor_digest="p",
    dtype="float32",
)


def activations(rows: int, vectors: int, dim: int, dtype: str = "float16") -> Values:
    """Hidden states [rows, layers, vectors, dim] of about the spread that real ones have."""
    rng = np.random.default_rng(0)
    shape = (rows, len(LAYERS), vectors, dim)
    values = rng.standard_normal(shape, np.float32)
    # A few channels of a transformer are far larger than all others.
    values *= np.where(rng.random(dim) < 0.01, 30, 1).astype(np.float32)
    return values.astype(dtype)


def write_cache(
    path: Path,
    hidden: Values,
    inputs: Mapping[str, Values] | None = None,
    chunk: int | None = None,
    *,
    packed: bool = False,
) -> None:
    """Write a cache with craft's own writer, in chunks of a build's size or of `chunk` rows.

    Vectors of zeros are empty slots, which `packed` hidden states do not store.
    """
    inputs = inputs or {}
    images = "embedded" if any("image" in name for name in inputs) else "reference"
    rows = {f"hidden/vlm.{layer}": hidden[:, i] for i, layer in enumerate(LAYERS)} | dict(inputs)
    widest = max(values[0].nbytes for values in rows.values())
    manifest = _manifest(hidden, images, chunk or rows_per_chunk(widest, len(hidden)))
    if packed:
        manifest = replace(manifest, packed=tuple(f"hidden/vlm.{layer}" for layer in LAYERS))
    specs = required_arrays(manifest)
    specs |= {
        name: ArraySpec(shape=values.shape[1:], dtype=str(values.dtype))
        for name, values in inputs.items()
    }
    count = len(hidden)
    rows |= {f"index/{name}": np.arange(count) for name in ("dataset_index", "frame")}
    rows |= {f"index/{name}": np.zeros(count, np.int64) for name in ("episode", "task")}
    rows |= {"valid": np.ones(count, bool), "hidden_mask": np.asarray(hidden[:, 0].any(axis=-1))}
    with CacheWriter.create(path, manifest, specs, tasks=["do it"], overwrite=False) as writer:
        for number in range(manifest.chunk_count):
            where = manifest.chunk_rows(number)
            writer.write_chunk(number, {name: values[where] for name, values in rows.items()})
        writer.finish()


def median_s(ways: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each way, all of them in turn, so that none has the machine to itself."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in times.items()}


def drop_page_cache(folder: Path) -> None:
    """Make the system forget the files, so that reading them means the disk."""
    for file in (file for file in folder.rglob("*") if file.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def size_on_disk(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def print_machine() -> None:
    """One line on when and where the figures were measured."""
    import torch
    import zarr

    models = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    print(
        f"{datetime.date.today()}, {os.cpu_count()} x {models[0] if models else platform.machine()}"
        f", load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, "
        f"numpy {np.__version__}, zarr {zarr.__version__}, torch {torch.__version__}"
    )


def pi0_fast_manifest(rows: int, slots: int, dim: int) -> Manifest:
    """The manifest of a cache that a build of pi0_fast makes by default."""
    states = np.broadcast_to(np.float16(0), (rows, len(LAYERS), slots, dim))
    return replace(
        _manifest(states, "reference", rows_per_chunk(slots * dim * 2, rows)),
        kinds=("hidden", "action"),
        pooling="action_tokens",
        dtype="bfloat16",
        packed=(
            *(f"hidden/vlm.{layer}" for layer in LAYERS),
            "outputs/top_logprobs",
            "outputs/top_tokens",
        ),
    )


def _manifest(hidden: Values, images: str, chunk: int) -> Manifest:
    rows, _, vectors, dim = hidden.shape
    return Manifest(
        complete=True,
        rows=rows,
        rows_per_chunk=chunk,
        stack="vlm",
        layers=LAYERS,
        layer_count=18,
        pooling="vision_text",
        vectors=vectors,
        dim=dim,
        dtype=str(hidden.dtype),
        images=images,
        sampling="uniform",
        prompts_digest=None,
        seed=0,
        teacher=_TEACHER,
        dataset=DatasetIdentity(
            repo_id="synthetic",
            root=None,
            revision=None,
            fingerprint="f",
            episodes=1,
            frames=rows,
            selection_digest="s",
        ),
    )
