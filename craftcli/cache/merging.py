"""Several caches of one teacher as one: their rows in order, each frame once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.format import (
    FORMAT_VERSION,
    DatasetIdentity,
    Manifest,
    rows_per_chunk,
)
from craftcli.cache.mergeable import check_mergeable
from craftcli.cache.reader import CacheReader
from craftcli.cache.regrouping import Rows, write_all
from craftcli.cache.writer import CacheWriter
from craftcli.errors import CraftError
from craftcli.locations import Location

MIXED = "mixed:"
"""How the fingerprint of rows from several datasets begins: no index there names one frame."""


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """What a merge put together."""

    sources: list[str]
    output: str
    rows: int
    source_rows: list[int]
    """Rows of each source."""
    duplicates: int
    """Rows left out because the same frame is there already."""
    datasets: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class MergePlan:
    """What a merge will write."""

    sources: tuple[CacheReader, ...]
    keep: tuple[NDArray[np.bool_], ...]
    """Which rows of each source are taken."""
    manifest: Manifest
    tasks: tuple[str, ...]

    @property
    def duplicates(self) -> int:
        """Rows that are left out."""
        return sum(int((~keep).sum()) for keep in self.keep)

    @property
    def bytes_per_row(self) -> int:
        """Payload of a row."""
        first = self.sources[0]
        return sum(first.spec(name).row_bytes for name in first.array_names())


def plan_merge(paths: Sequence[Location], *, keep_duplicates: bool = False) -> MergePlan:
    """Open the caches and check that their rows can stand in one; nothing is written.

    Raises:
        CraftError: fewer than two caches, one that cannot be opened, or settings that differ.
    """
    if len(paths) < 2:
        raise CraftError(
            "Nothing to merge.",
            why=f"{len(paths)} cache was given, and a merge takes two or more.",
            fix="name the caches to merge: craft cache merge A B -o C.",
        )
    # Every row is read once: keeping them in memory would gain nothing.
    sources = tuple(CacheReader.open(path, memory="mmap") for path in paths)
    check_mergeable(sources)
    tasks = tuple(dict.fromkeys(task for source in sources for task in source.tasks))
    index = [source.read_all("index/dataset_index") for source in sources]
    keep = _first_of_each(sources, index, tasks)
    if keep_duplicates:
        keep = [np.ones_like(kept) for kept in keep]
    selected = np.concatenate([rows[kept] for rows, kept in zip(index, keep, strict=True)])
    return MergePlan(
        sources=sources, keep=tuple(keep), manifest=_manifest(sources, selected), tasks=tasks
    )


def merge_caches(
    plan: MergePlan, output: Location, *, overwrite: bool, on_rows: Callable[[int], None]
) -> MergeReport:
    """Write the rows of a plan to a new cache at `output`, chunk by chunk."""
    first = plan.sources[0]
    arrays = {name: first.spec(name) for name in first.array_names()}
    with CacheWriter.create(
        output, plan.manifest, arrays, tasks=plan.tasks, overwrite=overwrite
    ) as writer:
        write_all(writer, _parts(plan), on_rows)
    return MergeReport(
        sources=[str(source.path) for source in plan.sources],
        output=str(output),
        rows=plan.manifest.rows,
        source_rows=[source.manifest.rows for source in plan.sources],
        duplicates=plan.duplicates,
        datasets=plan.manifest.dataset.repo_id,
    )


def _parts(plan: MergePlan) -> Iterator[Rows]:
    for source, keep in zip(plan.sources, plan.keep, strict=True):
        for chunk in range(source.manifest.chunk_count):
            where = source.manifest.chunk_rows(chunk)
            taken = np.flatnonzero(keep[where]) + where.start
            rows = {name: source.read(name, taken) for name in source.array_names()}
            rows["index/task"] = _renumbered(rows["index/task"], source.tasks, plan.tasks)
            yield rows


def _renumbered(
    numbers: NDArray[Any], own: Sequence[str], tasks: Sequence[str]
) -> NDArray[np.int64]:
    """Numbers into `own` as numbers into `tasks`."""
    # A row that is not valid may have any number; it gets the last.
    renumbered = np.array([*(tasks.index(task) for task in own), len(tasks) - 1], np.int64)
    known = (numbers >= 0) & (numbers < len(own))
    return np.asarray(renumbered[np.where(known, numbers, len(own))])


def _first_of_each(
    sources: Sequence[CacheReader], index: Sequence[NDArray[Any]], tasks: Sequence[str]
) -> list[NDArray[np.bool_]]:
    """Which rows stay when a frame under an instruction is kept once: its first valid row.

    Where an index does not name a frame of one dataset, every row stays.
    """
    lengths = [len(rows) for rows in index]
    total = sum(lengths)
    fingerprints = [source.manifest.dataset.fingerprint for source in sources]
    named = np.repeat([_names_frames(fingerprint) for fingerprint in fingerprints], lengths)
    keys = np.stack(
        [
            np.where(named, 0, np.arange(total)),
            np.repeat([fingerprints.index(fingerprint) for fingerprint in fingerprints], lengths),
            np.concatenate(index),
            np.concatenate(
                [_renumbered(s.read_all("index/task"), s.tasks, tasks) for s in sources]
            ),
        ]
    )
    invalid = ~np.concatenate([source.read_all("valid") for source in sources])
    # Of equal rows a valid one comes first; the sort leaves the rest in place.
    order = np.lexsort((invalid, *keys))
    begins = np.ones(total, bool)
    begins[1:] = np.diff(keys[:, order]).any(axis=0)
    keep = np.zeros(total, bool)
    keep[order[begins]] = True
    return np.split(keep, np.cumsum(lengths)[:-1])


def _names_frames(fingerprint: str) -> bool:
    return bool(fingerprint) and not fingerprint.startswith(MIXED)


def _manifest(sources: Sequence[CacheReader], selected: NDArray[Any]) -> Manifest:
    manifests = [source.manifest for source in sources]
    first = sources[0]
    widest = max(first.spec(name).row_bytes for name in first.array_names())
    rows = len(selected)
    prompts = dict.fromkeys(manifest.prompts_digest for manifest in manifests)
    return replace(
        manifests[0],
        format_version=FORMAT_VERSION,
        complete=False,
        rows=rows,
        rows_per_chunk=rows_per_chunk(widest, rows),
        sampling="indices",
        prompts_digest=next(iter(prompts)) if len(prompts) == 1 else _digest(prompts),
        dataset=_dataset([manifest.dataset for manifest in manifests], selected),
        versions=_versions(manifests),
    )


def _dataset(datasets: Sequence[DatasetIdentity], selected: NDArray[Any]) -> DatasetIdentity:
    chosen = _digest(selected.tolist())
    different = {dataset.fingerprint: dataset for dataset in reversed(datasets)}
    if len(different) == 1 and datasets[0].fingerprint:
        return replace(datasets[0], selection_digest=chosen)
    each = dict.fromkeys(name for dataset in datasets for name in dataset.repo_id.split("+"))
    known = all(dataset.fingerprint for dataset in datasets)
    return replace(
        datasets[0],
        repo_id="+".join(each),
        root=None,
        revision=None,
        # What is unknown of a part stays unknown of the whole.
        fingerprint=MIXED + _digest(sorted(different)) if known else "",
        episodes=sum(dataset.episodes for dataset in different.values()),
        frames=sum(dataset.frames for dataset in different.values()),
        selection_digest=chosen,
    )


def _versions(manifests: Sequence[Manifest]) -> dict[str, str]:
    names = dict.fromkeys(name for manifest in manifests for name in manifest.versions)
    return {
        name: ", ".join(dict.fromkeys(m.versions[name] for m in manifests if name in m.versions))
        for name in names
    }


def _digest(values: Any) -> str:
    # As `policies.identity` digests a selection.
    return sha256(" ".join(map(str, values)).encode()).hexdigest()
