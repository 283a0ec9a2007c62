"""Sums up the contents and the origin of a cache."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from craftcli.cache.dtypes import decode
from craftcli.cache.format import DIGESTS, layer_names
from craftcli.cache.made_rows import MadeRowsSummary, summarize_made_rows
from craftcli.cache.stats import Moments, scalar_variance
from craftcli.policies.identity import DatasetIdentity, TeacherIdentity

if TYPE_CHECKING:
    from craftcli.cache.reading.reader import CacheReader


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """L2 norms of one layer's valid vectors; all 0 if there are none."""

    layer: str
    """Name of the layer, `<stack>.<layer>`."""
    count: int
    """Vectors counted."""
    mean: float
    """Mean of their L2 norms."""
    std: float
    """Standard deviation of the norms."""
    min: float
    """Smallest norm."""
    max: float
    """Largest norm."""
    scalar_variance: float
    """Variance of a channel around its position's mean, averaged over positions by count."""


@dataclass(frozen=True, kw_only=True)
class CacheSummary:
    """Contents and origin of a cache."""

    path: str
    """Folder of the cache."""
    rows: int
    """Rows, valid or not."""
    valid_rows: int
    """Rows that may be trained on."""
    stack: str
    """The layer stack that was recorded."""
    layers: tuple[int, ...]
    """Recorded layers, counted from 0."""
    layer_count: int
    """Depth of the stack."""
    pooling: str
    """How token positions became vectors."""
    vectors: int
    """Vectors a row has in each layer."""
    dim: int
    """Width of a vector."""
    dtype: str
    """Dtype of the hidden states."""
    images: str
    """Where the images are."""
    seed: int
    """Seed of the sample selection."""
    kinds: tuple[str, ...]
    """What the rows can be retained by."""
    size_bytes: int
    """Bytes on disk, metadata included."""
    bytes_per_row: int
    """Payload bytes of a row over all arrays; the mean, where rows are packed."""
    chunks: int
    """Chunks along the row axis."""
    rows_per_chunk: int
    """Rows in every chunk but the last."""
    complete: bool
    """Whether every row was written."""
    sampling: str
    """How the rows were selected."""
    created: str
    """When the build ended, ISO 8601, by the time of the file."""
    teacher: TeacherIdentity
    """The policy that made the hidden states."""
    dataset: DatasetIdentity
    """The samples they were made on."""
    datasets: dict[str, int] | None
    """Valid rows of each dataset, if there are several, by its folder or name."""
    versions: dict[str, str]
    """Versions of the packages that built the cache."""
    layer_norms: tuple[LayerNorms, ...]
    """Sizes of the valid vectors, one entry a layer."""
    tasks: dict[str, int]
    """Valid rows of each task, in the order of the cache's task list."""
    episodes: int
    """Different episodes among the valid rows."""
    stats_sealed: bool | None
    """Whether digests cover the statistics; None if there are none."""
    frames_sealed: bool | None
    """Whether digests cover the frames of the dataset; None if the rows have no dataset."""
    made: MadeRowsSummary | None
    """The rows that no dataset holds; None if there are none."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


def summarize(reader: "CacheReader") -> CacheSummary:
    """Read the index and the hidden states once and sum them up.

    Raises:
        CraftError: a chunk is missing or damaged.
    """
    manifest = reader.manifest
    valid = reader.read_all("valid")
    task_counts = Counter(reader.read_all("index/task")[valid].tolist())
    norms = layer_names(manifest) if "hidden" in manifest.kinds else []
    return CacheSummary(
        path=str(reader.path),
        rows=manifest.rows,
        valid_rows=int(valid.sum()),
        stack=manifest.stack,
        layers=manifest.layers,
        layer_count=manifest.layer_count,
        pooling=manifest.pooling,
        vectors=manifest.vectors,
        dim=manifest.dim,
        dtype=manifest.dtype,
        images=manifest.images,
        seed=manifest.seed,
        kinds=manifest.kinds,
        size_bytes=reader.size_on_disk(),
        bytes_per_row=reader.row_bytes(),
        chunks=manifest.chunk_count,
        rows_per_chunk=manifest.rows_per_chunk,
        complete=manifest.complete,
        sampling=manifest.sampling,
        created=_ended(reader),
        teacher=manifest.teacher,
        dataset=manifest.dataset,
        datasets=_rows_by_dataset(reader, valid),
        versions=manifest.versions,
        layer_norms=tuple(_layer_norms(reader, layer) for layer in norms),
        tasks={task: task_counts[i] for i, task in enumerate(reader.tasks)},
        episodes=len(np.unique(reader.read_all("index/episode")[valid])),
        stats_sealed=reader.stats_sealed,
        frames_sealed=_frames_sealed(reader),
        made=summarize_made_rows(reader),
    )


def _rows_by_dataset(reader: "CacheReader", valid: npt.NDArray[np.bool_]) -> dict[str, int] | None:
    datasets = reader.manifest.datasets
    if datasets is None:
        return None
    frames = reader.read_all("index/dataset_index")[valid]
    ends = np.cumsum([dataset.frames for dataset in datasets])
    rows = np.bincount(np.searchsorted(ends, frames, side="right"), minlength=len(datasets))
    names = [dataset.root or dataset.repo_id for dataset in datasets]
    return {name: int(count) for name, count in zip(names, rows, strict=False)}


def _frames_sealed(reader: "CacheReader") -> bool | None:
    if not reader.manifest.has_dataset or not reader.manifest.dataset.fingerprint:
        return None
    return any(name.startswith(DIGESTS) for name in reader.array_names())


def _ended(reader: "CacheReader") -> str:
    # Not in the manifest, because the same build must give the same bytes at any time.
    return reader.modified().astimezone(UTC).isoformat(timespec="seconds")


def _layer_norms(reader: "CacheReader", layer: str) -> LayerNorms:
    moments = Moments(vectors=1, dim=1)
    smallest, largest = np.inf, 0.0
    for norms in _valid_norms(reader, layer):
        if norms.size:
            moments.update(norms[:, None, None], np.ones((norms.size, 1), bool))
            smallest, largest = min(smallest, norms.min()), max(largest, norms.max())
    count = int(moments.count[0])
    stats = reader.stats(layer)
    return LayerNorms(
        layer=layer,
        count=count,
        mean=float(moments.mean[0, 0]),
        std=float(np.sqrt(moments.variance[0, 0])),
        min=float(smallest) if count else 0.0,
        max=float(largest),
        scalar_variance=scalar_variance(stats.variance, stats.count),
    )


def _valid_norms(reader: "CacheReader", layer: str) -> Iterator[npt.NDArray[np.float64]]:
    manifest = reader.manifest
    for chunk in range(manifest.chunk_count):
        where = manifest.chunk_rows(chunk)
        rows = np.arange(where.start, where.stop)
        targets = reader.read("hidden_mask", rows) & reader.read("valid", rows)[:, None]
        vectors = decode(reader.read(f"hidden/{layer}", rows), manifest.dtype)[targets]
        yield np.linalg.norm(vectors.astype(np.float64), axis=-1)
