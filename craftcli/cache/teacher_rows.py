"""What is stored for a row: the teacher's hidden states, and the inputs it saw."""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from craftcli.cache.chunks import ArraySpec
from craftcli.cache.dtypes import encode
from craftcli.cache.inputs import UINT8_IMAGE, fits_bytes, pack
from craftcli.cache.layers import parse_layers, resolve_layers
from craftcli.cache.pooling import needs_action_tokens, pool, required_tokens
from craftcli.cache.prompts import Prompts
from craftcli.choices import Images, Pooling, StoreDtype
from craftcli.config import CacheConfig
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import Batch, PolicyAdapter
from craftcli.policies.data import read_rows
from craftcli.policies.loading import Checkpoint

type Rows = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is kept of a teacher: which layers of which stack, which tokens, in which precision."""

    stack: str
    layers: tuple[int, ...]
    """Counted from 0."""
    layer_count: int
    pooling: Pooling
    dtype: str


def resolve_recipe(config: CacheConfig, teacher: Checkpoint) -> Recipe:
    """The settings with the policy family's defaults filled in, checked against the policy."""
    adapter = teacher.adapter
    stack = config.stack or adapter.default_stack
    count = len(adapter.stack(teacher.policy, stack).layers)
    layers = adapter.default_layers if config.layers is None else parse_layers(config.layers)
    pooling = config.pooling or adapter.default_pooling
    _check_tokens(adapter, pooling)
    dtype = config.dtype.value
    if config.dtype is StoreDtype.AUTO:
        dtype = str(adapter.compute_dtype(teacher.policy)).removeprefix("torch.")
    return Recipe(
        stack=stack,
        layers=resolve_layers(layers, count),
        layer_count=count,
        pooling=pooling,
        dtype=dtype,
    )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Rows that were read and preprocessed, before the teacher has seen them."""

    index: Rows
    batch: Batch


class TeacherRows:
    """Runs the teacher over rows of a dataset.

    What it gives for a row depends on that row and on nothing that was computed before.
    """

    def __init__(
        self,
        teacher: Checkpoint,
        dataset: Any,
        recipe: Recipe,
        *,
        first: int,
        images: Images = Images.EMBED,
        prompts: Prompts | None = None,
    ) -> None:
        self._teacher = teacher
        self._dataset = dataset
        self._recipe = recipe
        self.prompts = prompts or Prompts()
        self.tasks = self.prompts.all([str(task) for task in dataset.meta.tasks.index])
        self._task_numbers = {task: number for number, task in enumerate(self.tasks)}
        teacher.policy.eval()
        # How images are packed is decided once, on the first anchor, for all rows.
        batch = teacher.preprocess(read_rows(dataset, [first]))
        cameras = teacher.adapter.image_keys(teacher.policy, batch)
        self._as_bytes = {key for key in cameras if fits_bytes(batch[key].cpu())}
        self._left_out = frozenset(cameras if images is Images.REFERENCE else ())
        self.specs = self._specs(self.compute([first]))

    def compute(self, rows: list[int]) -> Rows:
        """The arrays of these dataset rows."""
        return self.run(self.prepare(rows))

    def prepare(self, rows: list[int]) -> Prepared:
        """Read and preprocess rows: what a thread can do while the teacher runs."""
        raw = read_rows(self._dataset, rows)
        raw["task"] = [
            self.prompts.of(task, index)
            for task, index in zip(raw["task"], raw["index"].tolist(), strict=True)
        ]
        index = {
            "index/dataset_index": raw["index"],
            "index/episode": raw["episode_index"],
            "index/frame": raw["frame_index"],
            "index/task": torch.tensor([self._task_numbers[task] for task in raw["task"]]),
        }
        return Prepared(
            index={name: value.numpy() for name, value in index.items()},
            batch=self._teacher.preprocess(raw),
        )

    def run(self, prepared: Prepared) -> Rows:
        """Run the teacher; the arrays of the rows that were prepared."""
        batch = prepared.batch
        return {**prepared.index, **self._hidden(batch), **self._inputs(batch)}

    @torch.no_grad()
    def _hidden(self, batch: Batch) -> Rows:
        """The states of every layer; a row that is not finite in one is invalid and zero in all."""
        recipe = self._recipe
        features = self._teacher.adapter.features(
            self._teacher.policy,
            batch,
            stack=recipe.stack,
            layers=recipe.layers,
            with_actions=needs_action_tokens(recipe.pooling),
        )
        pooled = {
            layer: pool(features.hidden[layer], features.masks, recipe.pooling)
            for layer in recipe.layers
        }
        valid = _finite_rows([layer.vectors for layer in pooled.values()])
        stored: Rows = {"valid": valid.cpu().numpy()}
        for layer, states in pooled.items():
            vectors = torch.where(valid[:, None, None], states.vectors, 0)
            stored[f"hidden/{recipe.stack}.{layer}"] = encode(vectors.cpu().numpy(), recipe.dtype)
            stored["hidden_mask"] = states.mask.cpu().numpy()
        return stored

    def _inputs(self, batch: Batch) -> Rows:
        keys = self._teacher.adapter.input_keys(
            self._teacher.policy, batch, with_actions=needs_action_tokens(self._recipe.pooling)
        )
        return {
            f"inputs/{key}": pack(batch[key], as_bytes=key in self._as_bytes)
            for key in keys
            if key not in self._left_out
        }

    def _specs(self, rows: Rows) -> dict[str, ArraySpec]:
        packed = {f"inputs/{key}" for key in self._as_bytes}
        return {
            name: ArraySpec(
                shape=values.shape[1:],
                dtype=str(values.dtype),
                attributes=UINT8_IMAGE if name in packed else {},
            )
            for name, values in rows.items()
        }


def _check_tokens(adapter: PolicyAdapter, pooling: Pooling) -> None:
    missing = required_tokens(pooling) - adapter.token_kinds
    if missing:
        raise CraftError(
            f"The pooling {pooling} does not work for this policy.",
            why=f"{adapter.policy_types[0]} has no {' or '.join(sorted(missing))} tokens.",
            fix=f"use --pooling {adapter.default_pooling}.",
            exit_code=EXIT_USAGE,
        )


def _finite_rows(layers: list[torch.Tensor]) -> torch.Tensor:
    """[B] bool: which rows have no NaN or infinity in the vectors of any layer."""
    return torch.stack([torch.isfinite(layer).flatten(1).all(1) for layer in layers]).all(0)
