"""Building a cache: dataset -> processor -> teacher -> pooling -> store."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from craftcli.cache.format import Manifest, rows_per_chunk
from craftcli.cache.selection import select_rows
from craftcli.cache.store import required_arrays
from craftcli.cache.teacher_rows import Recipe, Rows, TeacherRows, resolve_recipe
from craftcli.cache.writer import CacheWriter
from craftcli.config import CacheConfig
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


def build_cache(
    config: CacheConfig,
    teacher: Checkpoint,
    dataset: Any,
    *,
    on_plan: Callable[[BuildPlan], None],
    on_rows: Callable[[int], None],
) -> None:
    """Run the teacher over the selected rows and store what it computes at `config.output`."""
    recipe = resolve_recipe(config, teacher)
    selected = select_rows(len(dataset), config.samples, config.seed)
    source = TeacherRows(teacher, dataset, recipe, first=selected[0])
    manifest = _manifest(config, teacher, dataset, recipe, selected, source)
    bytes_per_row = sum(spec.row_bytes for spec in source.specs.values())
    on_plan(BuildPlan(rows=len(selected), bytes_per_row=bytes_per_row, recipe=recipe))
    with CacheWriter.create(
        config.output,
        manifest,
        source.specs | required_arrays(manifest),
        tasks=[str(task) for task in dataset.meta.tasks.index],
        overwrite=config.overwrite,
    ) as writer:
        for chunk in range(manifest.chunk_count):
            rows = selected[manifest.chunk_rows(chunk)]
            writer.write_chunk(chunk, _joined(_batches(source, rows, config.batch_size, on_rows)))
        writer.finish()


def _manifest(
    config: CacheConfig,
    teacher: Checkpoint,
    dataset: Any,
    recipe: Recipe,
    selected: list[int],
    source: TeacherRows,
) -> Manifest:
    vectors, dim = source.specs[f"hidden/{recipe.stack}.{recipe.layers[0]}"].shape
    widest = max(spec.row_bytes for spec in source.specs.values())
    return Manifest(
        complete=False,
        rows=len(selected),
        rows_per_chunk=rows_per_chunk(widest, len(selected)),
        stack=recipe.stack,
        layers=recipe.layers,
        layer_count=recipe.layer_count,
        pooling=recipe.pooling,
        vectors=vectors,
        dim=dim,
        dtype=recipe.dtype,
        images="embedded",
        sampling="uniform",
        prompts_digest=None,
        seed=config.seed,
        teacher=teacher_identity(teacher),
        dataset=dataset_identity(dataset, selected),
        versions={name: version(name) for name in RECORDED_VERSIONS},
    )


def _batches(
    source: TeacherRows, rows: list[int], size: int, on_rows: Callable[[int], None]
) -> Iterator[Rows]:
    """The rows of one chunk; batches never cross into the next, so that a chunk stands alone."""
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        yield source.compute(batch)
        on_rows(len(batch))


def _joined(batches: Iterator[Rows]) -> Rows:
    parts = list(batches)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
