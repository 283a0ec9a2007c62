"""Builds a cache: dataset -> processor -> teacher -> pooling -> writer, chunk by chunk."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from craftcli.cache.build.anchor_selection import select_rows
from craftcli.cache.build.expected_size import ExpectedSize, arrays_to_pack
from craftcli.cache.build.prompts import Prompts, read_prompts
from craftcli.cache.build.recipe import Recipe, resolve_recipe
from craftcli.cache.build.recorded_rows import RecordedRows
from craftcli.cache.build.row_sources import (
    DatasetFrames,
    RowSource,
    StatisticsRows,
    VariedFrames,
)
from craftcli.cache.build.teacher import HIDDEN, TeacherRows
from craftcli.cache.format import (
    MadeRows,
    Manifest,
    rows_per_chunk,
)
from craftcli.cache.storage.chunks import RowArrays
from craftcli.cache.storage.zarr_layout import required_arrays
from craftcli.cache.variations import SEEDS
from craftcli.cache.writing.unfinished import Resumable
from craftcli.cache.writing.writer import CacheWriter
from craftcli.choices import Images, Sampling
from craftcli.config.cache import CacheConfig
from craftcli.distributed import Processes
from craftcli.errors import CraftError
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.lerobot.identity import teacher_identity
from craftcli.policies.lerobot.input_statistics import input_statistics
from craftcli.policies.lerobot.task_processors import StatisticsChoice, Stored, fit_to

RECORDED_VERSIONS = ("craftcli", "lerobot", "torch", "transformers", "zarr")


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """The size and contents of a build, known before it starts."""

    rows: int
    made: MadeRows | None
    """How rows are made that no dataset holds."""
    size: ExpectedSize
    smaller: Mapping[str, int]
    """Bytes of the whole cache with other options, by the option."""
    recipe: Recipe
    statistics: StatisticsChoice
    """The statistics that normalise the rows."""


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """The result of a build."""

    rows: int
    """Rows, valid or not."""
    invalid: tuple[int, ...]
    """Dataset indices of the rows with NaN or infinity; they are not trained on."""
    reused: int
    """Chunks that an earlier, interrupted build had committed."""
    invalid_made: int = 0
    """Rows with NaN or infinity that are not frames of the dataset, but were made."""


def build_cache(
    config: CacheConfig,
    teacher: Checkpoint,
    dataset: Any,
    *,
    on_plan: Callable[[BuildPlan], None],
    on_rows: Callable[[int], None],
    prompts: Prompts | None = None,
) -> BuildReport:
    """Run the teacher over the selected rows and store the results at `config.output`.

    `dataset` is what `open_source` takes; `prompts` take the place of those in the file that the
    settings name.
    Under torchrun every process calls this and computes its share of the chunks.
    """
    fitted = fit_to(teacher, None if config.from_statistics else dataset, config.stats)
    teacher = fitted.policy.for_stack(config.stack)
    recipe = resolve_recipe(config, teacher)
    prompts = prompts or read_prompts(config.prompts, config.seed)
    source = open_source(config, teacher, dataset, prompts)
    rows = TeacherRows(teacher, source, recipe, images=config.stored_images)
    manifest = describe_build(config, teacher, source, prompts, rows, statistics=fitted.stored)
    size = ExpectedSize.of(manifest, rows.first)
    on_plan(
        BuildPlan(
            rows=len(source),
            made=source.made,
            size=size,
            smaller=size.smaller(manifest, None if config.indices else config.samples),
            recipe=rows.recipe,
            statistics=fitted.choice,
        )
    )
    processes = Processes.from_environment()
    with (
        processes.connected(),
        CacheWriter.create(
            config.output,
            manifest,
            rows.specs | required_arrays(manifest),
            tasks=source.tasks,
            overwrite=config.overwrite,
            resumable=_resumable(config, teacher),
            processes=processes,
        ) as writer,
    ):
        progress = _Progress(len(source), processes.world, on_rows)
        for chunk in processes.own(manifest.chunk_count):
            numbers = range(len(source))[manifest.chunk_rows(chunk)]
            if chunk in writer.reused:
                progress.advance(len(numbers))
                continue
            batches = _batches(rows, numbers, config.batch_size, progress.advance)
            writer.write_chunk(chunk, _joined(batches))
        report = _report(writer, processes, source.made)
        progress.complete()
        writer.finish()
    return report


def open_source(
    config: CacheConfig, teacher: Checkpoint, dataset: Any, prompts: Prompts
) -> RowSource:
    """The rows that the settings ask for; `dataset` is None where no data is needed.

    With --env, `dataset` is the `RecordedFrames`; with --from-statistics, data that shows how the
    numbers of a state move, if there is any.
    """
    if config.env is not None:
        return RecordedRows(dataset, input_statistics(teacher), prompts, config.seed)
    if config.from_statistics:
        statistics = input_statistics(teacher, config.statistics_file)
        statistics.require_vectors_only(option="--from-statistics")
        if dataset is not None:
            statistics = statistics.moving_as(dataset)
        return StatisticsRows(
            statistics, rows=config.samples, tasks=prompts.all_for([""]), seed=config.seed
        )
    selected = select_rows(config, dataset)
    frames = DatasetFrames(dataset, selected, prompts, config.seed)
    per_frame = config.augment or config.draws - 1
    if not per_frame:
        return frames
    statistics = input_statistics(teacher)
    if config.augment:
        statistics = statistics.with_fixed(config.fixed).moving_as(dataset, selected)
        statistics.require_variable(option="--augment")
    return VariedFrames(
        frames,
        per_frame=per_frame,
        statistics=statistics,
        noise=config.augment_noise,
        mix=config.augment > 0,
        seed=config.seed,
    )


def _resumable(config: CacheConfig, teacher: Checkpoint) -> Resumable:
    # Matrix products round differently with another shape or on another device.
    device = next(teacher.policy.parameters()).device.type
    settings = {"batch_size": config.batch_size, "device": device}
    return Resumable(resume=config.resume, settings=settings)


def _report(writer: CacheWriter, processes: Processes, made: MadeRows | None) -> BuildReport:
    """Sum up what all processes wrote; refuse a cache without a single valid row."""
    reused = processes.total(len(writer.reused))
    valid = writer.read_all("valid")
    invalid = writer.read_all("index/dataset_index")[~valid].tolist()
    if not valid.any():
        writer.discard()
        raise CraftError(
            "The teacher's outputs are not finite.",
            why=f"all {len(valid)} rows have NaN or infinity, dataset frames {invalid[:5]} first.",
            fix="check these frames and the weights of the teacher; nothing was written.",
        )
    invalid_made = int((writer.read_all(SEEDS)[~valid] >= 0).sum()) if made else 0
    return BuildReport(
        rows=len(valid), invalid=tuple(invalid), reused=reused, invalid_made=invalid_made
    )


class _Progress:
    """Rows done by all processes, estimated from this one's; the sum is exact in the end."""

    def __init__(self, rows: int, world: int, on_rows: Callable[[int], None]) -> None:
        self._left = rows
        self._world = world
        self._on_rows = on_rows

    def advance(self, rows: int) -> None:
        """Count rows of this process, and as many of every other."""
        done = min(rows * self._world, self._left)
        self._left -= done
        if done:
            self._on_rows(done)

    def complete(self) -> None:
        """Count the rows that are left: all processes are done."""
        self.advance(self._left)


def describe_build(
    config: CacheConfig,
    teacher: Checkpoint,
    source: RowSource,
    prompts: Prompts,
    rows: TeacherRows,
    *,
    statistics: Stored | None,
) -> Manifest:
    """The manifest of the cache that these settings make."""
    recipe = rows.recipe
    vectors, dim = 1, 1
    if recipe.layers:
        vectors, dim = rows.specs[f"{HIDDEN}{recipe.stack}.{recipe.layers[0]}"].shape
    widest = max(spec.row_bytes for spec in rows.specs.values())
    return Manifest(
        kinds=tuple(kind.value for kind in recipe.kinds),
        complete=False,
        rows=len(source),
        rows_per_chunk=rows_per_chunk(widest, len(source), int(config.chunk_mib * 2**20)),
        stack=recipe.stack,
        layout=recipe.layout.value if recipe.layout else None,
        layers=recipe.layers,
        layer_count=recipe.layer_count,
        pooling=recipe.pooling,
        vectors=vectors,
        dim=dim,
        dtype=recipe.dtype,
        images="embedded" if config.stored_images is Images.EMBED else "reference",
        sampling=_sampling(config),
        prompts_digest=prompts.digest,
        actions=config.actions.value,
        seed=config.seed,
        teacher=teacher_identity(teacher),
        dataset=source.identity(),
        datasets=source.parts,
        made=source.made,
        decoder=source.decoder,
        statistics=statistics,
        packed=arrays_to_pack(rows.first),
        versions={name: version(name) for name in RECORDED_VERSIONS},
    )


def _batches(
    source: TeacherRows, rows: range, size: int, on_rows: Callable[[int], None]
) -> Iterator[RowArrays]:
    """The rows of one chunk in batches; no batch crosses chunks, so that each stands alone."""
    pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
    for piece, prepared in zip(pieces, map_one_ahead(source.prepare, pieces), strict=True):
        yield source.run(prepared)
        on_rows(len(piece))


def _joined(batches: Iterator[RowArrays]) -> RowArrays:
    parts = list(batches)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def map_one_ahead[T, R](work: Callable[[T], R], items: Iterable[T]) -> Generator[R]:
    """Apply `work` to every item in order; a thread computes one item ahead.

    There is one thread, so that two items are never computed at once. An error is raised where the
    result was expected. Leaving early waits for the running item and drops it.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        current = None
        for item in items:
            following = thread.submit(work, item)
            if current is not None:
                yield current.result()
            current = following
        if current is not None:
            yield current.result()


def _sampling(config: CacheConfig) -> str:
    """How the rows were selected, as the manifest names it; rows without frames have no phases."""
    if config.indices:
        return "indices"
    return (config.sampling if config.needs_dataset else Sampling.UNIFORM).value
