"""Building a cache: dataset -> processor -> teacher -> pooling -> store."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from craftcli.cache.chunks import ArraySpec
from craftcli.cache.dtypes import encode
from craftcli.cache.format import Manifest, rows_per_chunk
from craftcli.cache.inputs import UINT8_IMAGE, pack
from craftcli.cache.layers import parse_layers, resolve_layers
from craftcli.cache.pooling import needs_action_tokens, pool, required_tokens, vector_count
from craftcli.cache.selection import select_rows
from craftcli.cache.store import required_arrays
from craftcli.cache.writer import CacheWriter
from craftcli.choices import Pooling, StoreDtype
from craftcli.config import CacheConfig
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import Batch, PolicyAdapter
from craftcli.policies.data import read_rows
from craftcli.policies.identity import dataset_identity, teacher_identity
from craftcli.policies.loading import Checkpoint

type Rows = dict[str, NDArray[Any]]

RECORDED_VERSIONS = ("craftcli", "lerobot", "torch", "transformers", "zarr")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is kept of a teacher: which layers of which stack, which tokens, in which precision."""

    stack: str
    layers: tuple[int, ...]
    """Counted from 0."""
    layer_count: int
    pooling: Pooling
    dtype: str


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
    teacher.policy.eval()
    batches = _teacher_batches(config, teacher, dataset, recipe, selected)
    first = next(batches)
    arrays = _specs(first)
    bytes_per_row = sum(spec.row_bytes for spec in arrays.values())
    tasks = [str(task) for task in dataset.meta.tasks.index]
    manifest = _manifest(config, teacher, dataset, recipe, selected, arrays)
    arrays |= required_arrays(manifest)
    on_plan(BuildPlan(rows=len(selected), bytes_per_row=bytes_per_row, recipe=recipe))
    with CacheWriter.create(
        config.output, manifest, arrays, tasks=tasks, overwrite=config.overwrite
    ) as writer:
        rows = _with_progress(first, batches, on_rows)
        for chunk, values in enumerate(_in_chunks(rows, manifest.rows_per_chunk)):
            writer.write_chunk(chunk, values)
        writer.finish()


def resolve_recipe(config: CacheConfig, teacher: Checkpoint) -> Recipe:
    """The settings with the policy family's defaults filled in, checked against the policy."""
    adapter = teacher.adapter
    stack = config.stack or adapter.default_stack
    count = len(adapter.stack(teacher.policy, stack).layers)
    layers = parse_layers(config.layers) if config.layers else adapter.default_layers
    pooling = config.pooling or adapter.default_pooling
    _check_tokens(adapter, pooling)
    dtype = config.dtype.value
    if config.dtype is StoreDtype.AUTO:
        dtype = str(next(teacher.policy.parameters()).dtype).removeprefix("torch.")
    return Recipe(
        stack=stack,
        layers=resolve_layers(layers, count),
        layer_count=count,
        pooling=pooling,
        dtype=dtype,
    )


def _check_tokens(adapter: PolicyAdapter, pooling: Pooling) -> None:
    missing = required_tokens(pooling) - adapter.token_kinds
    if missing:
        raise CraftError(
            f"The pooling {pooling} does not work for this policy.",
            why=f"{adapter.policy_types[0]} has no {' or '.join(sorted(missing))} tokens.",
            fix=f"use --pooling {adapter.default_pooling}.",
            exit_code=EXIT_USAGE,
        )


def _teacher_batches(
    config: CacheConfig, teacher: Checkpoint, dataset: Any, recipe: Recipe, selected: list[int]
) -> Iterator[Rows]:
    for start in range(0, len(selected), config.batch_size):
        rows = selected[start : start + config.batch_size]
        raw = read_rows(dataset, rows)
        index = {
            "index/dataset_index": raw["index"],
            "index/episode": raw["episode_index"],
            "index/frame": raw["frame_index"],
            "index/task": raw["task_index"],
        }
        batch = teacher.preprocess(raw)
        yield {
            **{name: value.numpy() for name, value in index.items()},
            "valid": np.ones(len(rows), dtype=bool),
            **teacher_rows(teacher, batch, recipe, rows),
            **_input_rows(teacher.adapter, batch),
        }


@torch.no_grad()
def teacher_rows(teacher: Checkpoint, batch: Batch, recipe: Recipe, rows: list[int]) -> Rows:
    """The teacher's pooled hidden states for a processed batch, as they are stored."""
    features = teacher.adapter.features(
        teacher.policy,
        batch,
        stack=recipe.stack,
        layers=recipe.layers,
        with_actions=needs_action_tokens(recipe.pooling),
    )
    stored: Rows = {}
    for layer in recipe.layers:
        pooled = pool(features.hidden[layer], features.masks, recipe.pooling)
        _check_finite(pooled.vectors, rows, layer)
        stored[f"hidden/{recipe.stack}.{layer}"] = encode(
            pooled.vectors.cpu().numpy(), recipe.dtype
        )
        stored["hidden_mask"] = pooled.mask.cpu().numpy()
    return stored


def _check_finite(vectors: torch.Tensor, rows: list[int], layer: int) -> None:
    finite = torch.isfinite(vectors).flatten(1).all(1)
    if not finite.all():
        bad = [row for row, fine in zip(rows, finite.tolist(), strict=True) if not fine]
        raise CraftError(
            f"The teacher gives hidden states that are not finite in layer {layer}.",
            why=f"dataset frames {bad[:5]} ({len(bad)} in this batch) give NaN or infinity.",
            fix="check these frames and the weights of the teacher; nothing was written.",
        )


def _input_rows(adapter: PolicyAdapter, batch: Batch) -> Rows:
    images = adapter.image_keys(batch)
    return {
        f"inputs/{key}": pack(batch[key], image=key in images) for key in adapter.input_keys(batch)
    }


def _specs(rows: Rows) -> dict[str, ArraySpec]:
    return {
        name: ArraySpec(
            shape=values.shape[1:],
            dtype=str(values.dtype),
            # Only packed images are bytes.
            attributes=UINT8_IMAGE if values.dtype == np.uint8 else {},
        )
        for name, values in rows.items()
    }


def _manifest(
    config: CacheConfig,
    teacher: Checkpoint,
    dataset: Any,
    recipe: Recipe,
    selected: list[int],
    arrays: dict[str, ArraySpec],
) -> Manifest:
    hidden = arrays[f"hidden/{recipe.stack}.{recipe.layers[0]}"]
    widest = max(spec.row_bytes for spec in arrays.values())
    return Manifest(
        complete=False,
        rows=len(selected),
        rows_per_chunk=rows_per_chunk(widest, len(selected)),
        stack=recipe.stack,
        layers=recipe.layers,
        layer_count=recipe.layer_count,
        pooling=recipe.pooling,
        vectors=vector_count(recipe.pooling, teacher.adapter.action_length(teacher.policy)),
        dim=hidden.shape[-1],
        dtype=recipe.dtype,
        images="embedded",
        seed=config.seed,
        teacher=teacher_identity(teacher),
        dataset=dataset_identity(dataset, selected),
        versions={name: version(name) for name in RECORDED_VERSIONS},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _with_progress(
    first: Rows, rest: Iterator[Rows], on_rows: Callable[[int], None]
) -> Iterator[Rows]:
    yield first
    on_rows(len(first["valid"]))
    for rows in rest:
        yield rows
        on_rows(len(rows["valid"]))


def _in_chunks(batches: Iterator[Rows], size: int) -> Iterator[Rows]:
    """Regroup batches of any length into chunks of `size` rows; the last may be shorter."""
    waiting: list[Rows] = []
    count = 0
    for batch in batches:
        waiting.append(batch)
        count += len(batch["valid"])
        while count >= size:
            joined = {name: np.concatenate([rows[name] for rows in waiting]) for name in batch}
            yield {name: values[:size] for name, values in joined.items()}
            waiting = [{name: values[size:] for name, values in joined.items()}]
            count -= size
    if count:
        yield {name: np.concatenate([rows[name] for rows in waiting]) for name in waiting[0]}
