"""Joins caches of one teacher (`craft cache merge`): all rows in order, each frame once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craftcli.cache.format import (
    DIGESTS,
    MadeRows,
    Manifest,
    rows_per_chunk,
)
from craftcli.cache.reading.reader import CacheReader
from craftcli.cache.storage.chunks import ArraySpec, RowArrays
from craftcli.cache.transfer.rechunk import write_all
from craftcli.cache.variations import SEEDS, VARIATION, frames_as_they_are, read_variations
from craftcli.cache.writing.writer import CacheWriter
from craftcli.errors import CraftError
from craftcli.locations import Location
from craftcli.policies.identity import DatasetIdentity, TeacherIdentity

MIXED = "mixed:"
"""Prefix of the fingerprint of rows from several datasets: an index alone names no frame there."""


@dataclass(frozen=True, kw_only=True)
class JoinReport:
    """The result of joining caches."""

    sources: list[str]
    output: str
    rows: int
    source_rows: list[int]
    """Rows of each source."""
    duplicates: int
    """Rows left out because another row has the same frame, instruction and variation."""
    datasets: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinPlan:
    """The rows and the manifest of the joined cache, known before it is written."""

    sources: tuple[CacheReader, ...]
    keep: tuple[NDArray[np.bool_], ...]
    """Which rows of each source are kept."""
    manifest: Manifest
    tasks: tuple[str, ...]
    arrays: Mapping[str, ArraySpec]
    """The arrays of the joined cache."""

    @property
    def duplicates(self) -> int:
        """Rows that are left out."""
        return sum(int((~keep).sum()) for keep in self.keep)

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows, about."""
        each = zip(self.sources, self.keep, strict=True)
        return sum(source.row_bytes() * int(keep.sum()) for source, keep in each)


def plan_join(
    paths: Sequence[Location], *, keep_duplicates: bool = False, several_teachers: bool = False
) -> JoinPlan:
    """Open the caches and check that they can be joined; nothing is written.

    With `several_teachers` the weights of their teachers may differ, and nothing else of them.

    Raises:
        CraftError: fewer than two caches, one that cannot be opened, or settings that differ.
    """
    if len(paths) < 2:
        raise CraftError(
            "Nothing to join.",
            why=f"{len(paths)} cache was given, and two or more are needed.",
            fix="name the caches to join: craft cache merge A B -o C.",
        )
    # Every row is read once, so that keeping rows in memory would gain nothing.
    sources = tuple(CacheReader.open(path, memory="mmap") for path in paths)
    require_joinable(sources, several_teachers=several_teachers)
    tasks = tuple(dict.fromkeys(task for source in sources for task in source.tasks))
    index = [source.read_all("index/dataset_index") for source in sources]
    keep = _first_of_each(sources, index, tasks)
    if keep_duplicates:
        keep = [np.ones_like(kept) for kept in keep]
    selected = np.concatenate([rows[kept] for rows, kept in zip(index, keep, strict=True)])
    arrays = _arrays(sources)
    widest = max(spec.row_bytes for spec in arrays.values())
    return JoinPlan(
        sources=sources,
        keep=tuple(keep),
        manifest=replace(
            _manifest(sources, selected),
            rows_per_chunk=rows_per_chunk(widest, len(selected)),
            made=_made(sources, keep),
            packed=_packed(sources, arrays),
        ),
        tasks=tasks,
        arrays=arrays,
    )


def _arrays(sources: Sequence[CacheReader]) -> dict[str, ArraySpec]:
    """The arrays of all parts; digests of frames only if every part has them, and alike."""
    arrays: dict[str, ArraySpec] = {}
    for source in sources:
        for name in source.array_names():
            arrays.setdefault(name, source.spec(name))
    return {
        name: spec
        for name, spec in arrays.items()
        if not name.startswith(DIGESTS)
        or all(name in s.array_names() and s.spec(name) == spec for s in sources)
    }


def _packed(
    sources: Sequence[CacheReader], arrays: Mapping[str, ArraySpec]
) -> tuple[str, ...] | None:
    """The arrays that are packed in some part."""
    packed = {name for source in sources for name in source.manifest.packed or ()}
    return tuple(sorted(packed & arrays.keys())) or None


def join_caches(
    plan: JoinPlan, output: Location, *, overwrite: bool, on_rows: Callable[[int], None]
) -> JoinReport:
    """Write the rows of a plan to a new cache at `output`, chunk by chunk."""
    with CacheWriter.create(
        output, plan.manifest, plan.arrays, tasks=plan.tasks, overwrite=overwrite
    ) as writer:
        write_all(writer, _parts(plan), on_rows)
    return JoinReport(
        sources=[str(source.path) for source in plan.sources],
        output=str(output),
        rows=plan.manifest.rows,
        source_rows=[source.manifest.rows for source in plan.sources],
        duplicates=plan.duplicates,
        datasets=plan.manifest.dataset.repo_id,
    )


def _parts(plan: JoinPlan) -> Iterator[RowArrays]:
    for source, keep in zip(plan.sources, plan.keep, strict=True):
        for chunk in range(source.manifest.chunk_count):
            where = source.manifest.chunk_rows(chunk)
            taken = np.flatnonzero(keep[where]) + where.start
            names = [name for name in source.array_names() if name in plan.arrays]
            rows = {name: source.read(name, taken) for name in names}
            if SEEDS in plan.arrays and SEEDS not in rows:
                rows |= frames_as_they_are(rows["index/dataset_index"]).arrays()
            rows["index/task"] = _renumbered(rows["index/task"], source.tasks, plan.tasks)
            yield rows


def _renumbered(
    numbers: NDArray[Any], own: Sequence[str], tasks: Sequence[str]
) -> NDArray[np.int64]:
    """Turn positions in the list `own` into positions in the list `tasks`."""
    # An invalid row may have any number; it gets the last one.
    renumbered = np.array([*(tasks.index(task) for task in own), len(tasks) - 1], np.int64)
    known = (numbers >= 0) & (numbers < len(own))
    return np.asarray(renumbered[np.where(known, numbers, len(own))])


def _first_of_each(
    sources: Sequence[CacheReader], index: Sequence[NDArray[Any]], tasks: Sequence[str]
) -> list[NDArray[np.bool_]]:
    """The rows to keep so that a frame with an instruction occurs once: its first valid row.

    Made rows count as equal only if they were made in the same way. Rows with an index that does
    not name a frame of one dataset are all kept.
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
            *_variation_keys(sources, index),
        ]
    )
    invalid = ~np.concatenate([source.read_all("valid") for source in sources])
    # Among equal rows a valid one comes first; otherwise the stable sort keeps their order.
    order = np.lexsort((invalid, *keys))
    begins = np.ones(total, bool)
    begins[1:] = np.diff(keys[:, order]).any(axis=0)
    keep = np.zeros(total, bool)
    keep[order[begins]] = True
    return np.split(keep, np.cumsum(lengths)[:-1])


def _variation_keys(
    sources: Sequence[CacheReader], index: Sequence[NDArray[Any]]
) -> list[NDArray[np.int64]]:
    """How every row was made: source and settings, second frame, weight and seed."""
    every = [
        read_variations(source, np.arange(len(rows))) or frames_as_they_are(rows)
        for source, rows in zip(sources, index, strict=True)
    ]
    ways = [(m.source, m.settings) if (m := s.manifest.made) else None for s in sources]
    way = [np.where(v.seeds >= 0, 1 + ways.index(w), 0) for v, w in zip(every, ways, strict=True)]
    return [
        np.concatenate(way),
        np.concatenate([v.partners for v in every]),
        # The bits of a weight, because all keys are whole numbers.
        np.concatenate([v.weights.view(np.int32) for v in every]).astype(np.int64),
        np.concatenate([v.seeds for v in every]),
    ]


def _made(sources: Sequence[CacheReader], keep: Sequence[NDArray[np.bool_]]) -> MadeRows | None:
    """How the made rows of all parts were made; None if there are none."""
    parts = [made for source in sources if (made := source.manifest.made)]
    if not parts:
        return None
    names = dict.fromkeys(name for part in parts for name in part.source.split("+"))
    settings: dict[str, list[str]] = {}
    for part in parts:
        for name, value in part.settings.items():
            settings.setdefault(name, []).append(value)
    rows = sum(
        int((source.read_all(SEEDS)[kept] >= 0).sum())
        for source, kept in zip(sources, keep, strict=True)
        if source.manifest.made
    )
    joined = {name: ", ".join(dict.fromkeys(values)) for name, values in settings.items()}
    return MadeRows(source="+".join(names), rows=rows, settings=joined)


def _names_frames(fingerprint: str) -> bool:
    return bool(fingerprint) and not fingerprint.startswith(MIXED)


def _manifest(sources: Sequence[CacheReader], selected: NDArray[Any]) -> Manifest:
    manifests = [source.manifest for source in sources]
    prompts = dict.fromkeys(manifest.prompts_digest for manifest in manifests)
    return replace(
        manifests[0],
        complete=False,
        rows=len(selected),
        sampling="indices",
        teacher=_teacher([manifest.teacher for manifest in manifests]),
        prompts_digest=next(iter(prompts)) if len(prompts) == 1 else _digest(prompts),
        dataset=_dataset([manifest.dataset for manifest in manifests], selected),
        datasets=_parts_of_all(manifests),
        versions=_versions(manifests),
        decoder=", ".join(dict.fromkeys(m.decoder for m in manifests if m.decoder)) or None,
    )


def _teacher(teachers: Sequence[TeacherIdentity]) -> TeacherIdentity:
    """The teacher of all parts; of several, none of which it is, it has the names."""
    digests = dict.fromkeys(teacher.weights_digest for teacher in teachers)
    if len(digests) == 1:
        return teachers[0]
    names = dict.fromkeys(name for teacher in teachers for name in teacher.source.split("+"))
    return replace(
        teachers[0],
        source="+".join(names),
        revision=None,
        weights_digest=MIXED + _digest(sorted(digests)),
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
        # If the fingerprint of one part is unknown, that of the whole is unknown.
        fingerprint=MIXED + _digest(sorted(different)) if known else "",
        episodes=sum(dataset.episodes for dataset in different.values()),
        frames=sum(dataset.frames for dataset in different.values()),
        selection_digest=chosen,
    )


def _parts_of_all(manifests: Sequence[Manifest]) -> tuple[DatasetIdentity, ...] | None:
    """The datasets of caches that have the same several; None otherwise.

    Which frames were selected is recorded for all of them together.
    """
    if len({manifest.dataset.fingerprint for manifest in manifests}) > 1:
        return None
    parts = manifests[0].datasets
    return parts and tuple(replace(part, selection_digest="") for part in parts)


def _versions(manifests: Sequence[Manifest]) -> dict[str, str]:
    names = dict.fromkeys(name for manifest in manifests for name in manifest.versions)
    return {
        name: ", ".join(dict.fromkeys(m.versions[name] for m in manifests if name in m.versions))
        for name in names
    }


def _digest(values: Any) -> str:
    # As `policies.identity` digests a selection.
    return sha256(" ".join(map(str, values)).encode()).hexdigest()


# All other fields must agree, including those that a later version of the format adds.
_MAY_DIFFER = frozenset(
    {
        "format_version",
        "complete",
        "rows",
        "rows_per_chunk",
        "sampling",
        "prompts_digest",
        "seed",
        "teacher",
        "dataset",
        "datasets",
        "versions",
        "made",
        "stats_digests",
        "decoder",
        "packed",
    }
)
_TEACHER_MAY_DIFFER = frozenset({"source", "revision"})


def require_joinable(sources: Sequence[CacheReader], *, several_teachers: bool = False) -> None:
    """Refuse caches of different teachers or settings, or with images in different datasets.

    With `several_teachers` their weights may differ.

    Raises:
        CraftError: names every field and array that differs.
    """
    for source in sources[1:]:
        _check_alike(sources[0], source, several_teachers=several_teachers)
    _check_images(sources)


def _check_alike(first: CacheReader, other: CacheReader, *, several_teachers: bool) -> None:
    ours, theirs = first.manifest.teacher, other.manifest.teacher
    # Without digests, a teacher is known only by its source.
    known = bool(ours.weights_digest and theirs.weights_digest)
    may_differ = _TEACHER_MAY_DIFFER if ours.weights_digest else frozenset()
    if known and several_teachers:
        may_differ |= {"weights_digest"}
    differing = [
        *_differences(Manifest, first.manifest, other.manifest, _MAY_DIFFER, ""),
        *_differences(TeacherIdentity, ours, theirs, may_differ, "teacher."),
        *_array_differences(first, other),
    ]
    if not differing:
        return
    advice = "join caches of the same teacher that were built with the same settings"
    if known and len(differing) == 1 and ours.weights_digest != theirs.weights_digest:
        advice += ", or add --several-teachers to hold a policy to what each of them knew"
    raise CraftError(
        f"{first.path} and {other.path} cannot be joined.",
        why=f"they differ in {'; '.join(differing)}.",
        fix=f"{advice}.",
    )


def _differences(
    cls: type[Any], first: Any, other: Any, may_differ: frozenset[str], prefix: str
) -> list[str]:
    pairs = {
        entry.name: (getattr(first, entry.name), getattr(other, entry.name))
        for entry in fields(cls)
        if entry.name not in may_differ
    }
    return [
        f"{prefix}{name} ({_short(ours)} and {_short(theirs)})"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]


def _array_differences(first: CacheReader, other: CacheReader) -> list[str]:
    ours, theirs = (
        {name: reader.spec(name) for name in reader.array_names()} for reader in (first, other)
    )
    # Differences in hidden arrays follow from the manifest and are named there. A cache without
    # made rows has no variations, and an older one no digests.
    return [
        f"array {name}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
        and not name.startswith(("hidden", VARIATION, DIGESTS))
    ]


def _check_images(sources: Sequence[CacheReader]) -> None:
    fingerprints = {source.manifest.dataset.fingerprint for source in sources}
    if len(fingerprints) > 1 and sources[0].manifest.images == "reference":
        names = " and ".join(source.manifest.dataset.repo_id for source in sources)
        raise CraftError(
            "These caches point to images of different datasets.",
            why=f"their rows refer to {names}, and a cache refers to one dataset.",
            fix="build them with craft cache build --images embed, then join them.",
        )


def _short(value: Any) -> str:
    text = str(list(value)) if isinstance(value, tuple) else str(value)
    return text[:12] if len(text) > 24 else text or "unknown"
