"""Building a cache: dataset -> processor -> teacher -> pooling -> store."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from craftcli.cache.ahead import ahead
from craftcli.cache.draft import Resumable
from craftcli.cache.format import Manifest, rows_per_chunk
from craftcli.cache.processes import Processes
from craftcli.cache.prompts import read_prompts
from craftcli.cache.selection import select_rows
from craftcli.cache.store import required_arrays
from craftcli.cache.teacher_rows import HIDDEN, Recipe, Rows, TeacherRows, resolve_recipe
from craftcli.cache.writer import CacheWriter
from craftcli.choices import Images
from craftcli.config import CacheConfig
from craftcli.errors import CraftError
from craftcli.policies.identity import dataset_identity, teacher_identity
from craftcli.policies.loading import Checkpoint

RECORDED_VERSIONS = ("craftcli", "lerobot", "torch", "transformers", "zarr")


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """What a build is about to write."""

    rows: int
    bytes_per_row: int
    recipe: Recipe

    @property
    def total_bytes(self) -> int:
        """Size of all rows."""
        return self.rows * self.bytes_per_row


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What a build wrote."""

    rows: int
    """Rows, valid or not."""
    invalid: tuple[int, ...]
    """Dataset indices of the rows on which the teacher was not finite; nothing trains on them."""
    reused: int
    """Chunks that an earlier, interrupted build had committed."""


def build_cache(
    config: CacheConfig,
    teacher: Checkpoint,
    dataset: Any,
    *,
    on_plan: Callable[[BuildPlan], None],
    on_rows: Callable[[int], None],
) -> BuildReport:
    """Run the teacher over the selected rows and store what it computes at `config.output`.

    Under torchrun every process does this, and each computes its share of the chunks.
    """
    teacher = teacher.for_stack(config.stack)
    recipe = resolve_recipe(config, teacher)
    selected = select_rows(config, dataset)
    prompts = read_prompts(config.prompts, config.seed)
    source = TeacherRows(
        teacher, dataset, recipe, first=selected[0], images=config.images, prompts=prompts
    )
    manifest = _manifest(config, teacher, dataset, selected, source)
    bytes_per_row = sum(spec.row_bytes for spec in source.specs.values())
    on_plan(BuildPlan(rows=len(selected), bytes_per_row=bytes_per_row, recipe=source.recipe))
    processes = Processes.from_environment()
    with (
        processes.joined(),
        CacheWriter.create(
            config.output,
            manifest,
            source.specs | required_arrays(manifest),
            tasks=source.tasks,
            overwrite=config.overwrite,
            resumable=_resumable(config, teacher),
            processes=processes,
        ) as writer,
    ):
        progress = _Progress(len(selected), processes.world, on_rows)
        for chunk in processes.own(manifest.chunk_count):
            rows = selected[manifest.chunk_rows(chunk)]
            if chunk in writer.reused:
                progress.advance(len(rows))
                continue
            batches = _batches(source, rows, config.batch_size, progress.advance)
            writer.write_chunk(chunk, _joined(batches))
        report = _report(writer, processes)
        progress.complete()
        writer.finish()
    return report


def _resumable(config: CacheConfig, teacher: Checkpoint) -> Resumable:
    # Matrix products of another shape, or on another device, round differently.
    device = next(teacher.policy.parameters()).device.type
    settings = {"batch_size": config.batch_size, "device": device}
    return Resumable(resume=config.resume, settings=settings)


def _report(writer: CacheWriter, processes: Processes) -> BuildReport:
    """What all processes wrote, once they have; an error if there is nothing to train on."""
    reused = processes.total(len(writer.reused))
    valid = writer.read_all("valid")
    invalid = writer.read_all("index/dataset_index")[~valid].tolist()
    if not valid.any():
        writer.discard()
        raise CraftError(
            "The teacher gives values that are not finite.",
            why=f"all {len(valid)} rows have NaN or infinity, dataset frames {invalid[:5]} first.",
            fix="check these frames and the weights of the teacher; nothing was written.",
        )
    return BuildReport(rows=len(valid), invalid=tuple(invalid), reused=reused)


class _Progress:
    """Rows done by all processes, estimated from this one's, so that they add up in the end."""

    def __init__(self, rows: int, world: int, on_rows: Callable[[int], None]) -> None:
        self._left = rows
        self._world = world
        self._on_rows = on_rows

    def advance(self, rows: int) -> None:
        """This process has done some rows, and so have the others."""
        done = min(rows * self._world, self._left)
        self._left -= done
        if done:
            self._on_rows(done)

    def complete(self) -> None:
        """All processes are done."""
        self.advance(self._left)


def _manifest(
    config: CacheConfig,
    teacher: Checkpoint,
    dataset: Any,
    selected: list[int],
    source: TeacherRows,
) -> Manifest:
    recipe = source.recipe
    vectors, dim = 1, 1
    if recipe.layers:
        vectors, dim = source.specs[f"{HIDDEN}{recipe.stack}.{recipe.layers[0]}"].shape
    widest = max(spec.row_bytes for spec in source.specs.values())
    return Manifest(
        kinds=tuple(kind.value for kind in recipe.kinds),
        complete=False,
        rows=len(selected),
        rows_per_chunk=rows_per_chunk(widest, len(selected), int(config.chunk_mib * 2**20)),
        stack=recipe.stack,
        layout=recipe.layout.value if recipe.layout else None,
        layers=recipe.layers,
        layer_count=recipe.layer_count,
        pooling=recipe.pooling,
        vectors=vectors,
        dim=dim,
        dtype=recipe.dtype,
        images="embedded" if config.images is Images.EMBED else "reference",
        sampling="indices" if config.indices else config.sampling.value,
        prompts_digest=source.prompts.digest,
        actions=config.actions.value,
        seed=config.seed,
        teacher=teacher_identity(teacher),
        dataset=dataset_identity(dataset, selected),
        versions={name: version(name) for name in RECORDED_VERSIONS},
    )


def _batches(
    source: TeacherRows, rows: list[int], size: int, on_rows: Callable[[int], None]
) -> Iterator[Rows]:
    """The rows of one chunk; batches never cross into the next, so that a chunk stands alone."""
    pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
    for piece, prepared in zip(pieces, ahead(source.prepare, pieces), strict=True):
        yield source.run(prepared)
        on_rows(len(piece))


def _joined(batches: Iterator[Rows]) -> Rows:
    parts = list(batches)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
