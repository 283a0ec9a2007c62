"""What is stored for a row: what the teacher made of it, and the inputs it saw."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from craftcli.cache.chunks import ArraySpec
from craftcli.cache.dtypes import encode
from craftcli.cache.inputs import UINT8_IMAGE, fits_bytes, pack
from craftcli.cache.layers import parse_layers, resolve_layers
from craftcli.cache.pooling import needs_action_tokens, pool, required_tokens
from craftcli.cache.prompts import Prompts
from craftcli.cache.teacher_outputs import check_kinds, default_kinds, stored_outputs
from craftcli.choices import ActionSource, Images, Kind, Layout, Pooling, StoreDtype
from craftcli.config import CacheConfig
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.policies.base import Batch, Features, Wanted
from craftcli.policies.data import read_rows
from craftcli.policies.loading import Checkpoint

type Rows = dict[str, NDArray[Any]]

HIDDEN = "hidden/"
_ACTION = "action"
"""How LeRobot's names of everything about actions begin."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is kept of a teacher: which layers of which stack, which tokens, in which precision."""

    kinds: tuple[Kind, ...]
    stack: str
    layers: tuple[int, ...]
    """Counted from 0; none when no hidden states are kept."""
    layer_count: int
    pooling: Pooling
    dtype: str
    actions: ActionSource
    top_k: int
    seed: int
    """Of what the policy draws at random."""
    layout: Layout | None = None
    """How the states lie of a stack that was named by its path; None until it is found."""

    @property
    def wanted(self) -> Wanted:
        """What is asked of the teacher's forward pass."""
        return Wanted(
            stack=self.stack,
            layers=self.layers,
            with_actions=needs_action_tokens(self.pooling),
            output=Kind.ACTION in self.kinds or Kind.TOKEN_CE in self.kinds,
            layout=self.layout,
        )


def resolve_recipe(config: CacheConfig, teacher: Checkpoint) -> Recipe:
    """The settings with the policy family's defaults filled in, checked against the policy."""
    adapter = teacher.adapter
    kinds = config.kinds or default_kinds(adapter)
    check_kinds(adapter, kinds)
    stack = config.stack or adapter.default_stack
    count = len(adapter.stack(teacher.policy, stack))
    layers = adapter.default_layers if config.layers is None else parse_layers(config.layers)
    pooling = config.pooling or adapter.pooling_of(stack)
    _check_tokens(teacher, stack, pooling)
    dtype = config.dtype.value
    if config.dtype is StoreDtype.AUTO:
        dtype = str(adapter.compute_dtype(teacher.policy)).removeprefix("torch.")
    return Recipe(
        kinds=kinds,
        stack=stack,
        layers=resolve_layers(layers, count) if Kind.HIDDEN in kinds else (),
        layer_count=count,
        pooling=pooling,
        dtype=dtype,
        actions=config.actions,
        top_k=config.top_k,
        seed=config.seed,
        layout=config.layout,
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
        self.recipe = recipe
        self.prompts = prompts or Prompts()
        self.tasks = self.prompts.all([str(task) for task in dataset.meta.tasks.index])
        self._task_numbers = {task: number for number, task in enumerate(self.tasks)}
        teacher.policy.eval()
        # How images are packed is decided once, on the first anchor, for all rows.
        batch = teacher.preprocess(read_rows(dataset, [first]))
        cameras = teacher.adapter.image_keys(teacher.policy, batch)
        self._as_bytes = {key for key in cameras if fits_bytes(batch[key].cpu())}
        self._left_out = frozenset(cameras if images is Images.REFERENCE else ())
        if recipe.layers and recipe.layout is None:
            self.recipe = replace(recipe, layout=self._found_layout(first))
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

    @torch.no_grad()
    def run(self, prepared: Prepared) -> Rows:
        """Run the teacher; the arrays of the rows that were prepared."""
        recipe, adapter, policy = self.recipe, self._teacher.adapter, self._teacher.policy
        batch = self._complete(prepared)
        features = adapter.features(policy, batch, recipe.wanted)
        targets = self._hidden(features) if recipe.layers else {}
        if features.output is not None:
            targets |= stored_outputs(
                adapter, batch, features.output, recipe.kinds, top_k=recipe.top_k
            )
        return {**prepared.index, **_stored(targets, recipe.dtype), **self._inputs(batch)}

    def _complete(self, prepared: Prepared) -> Batch:
        """The batch as the teacher takes it, with whatever it would draw at random."""
        adapter, policy = self._teacher.adapter, self._teacher.policy
        # Decoding actions takes many forward passes, and prefix states depend on none.
        read = adapter.input_keys(policy, prepared.batch, self.recipe.wanted)
        acts = any(key.startswith(_ACTION) for key in read)
        return adapter.anchor_inputs(
            policy,
            prepared.batch,
            seeds=row_seeds(self.recipe.seed, prepared.index["index/dataset_index"]),
            own_actions=acts and self.recipe.actions is ActionSource.TEACHER,
        )

    @torch.no_grad()
    def _found_layout(self, row: int) -> Layout | None:
        return self._teacher.adapter.found_layout(
            self._teacher.policy, self._complete(self.prepare([row])), self.recipe.wanted
        )

    def _hidden(self, features: Features) -> dict[str, Tensor]:
        """The pooled states of every layer, and which of their vectors exist."""
        recipe = self.recipe
        pooled = {
            layer: pool(features.hidden[layer], features.masks, recipe.pooling)
            for layer in recipe.layers
        }
        states = {f"{HIDDEN}{recipe.stack}.{layer}": p.vectors for layer, p in pooled.items()}
        return {**states, "hidden_mask": next(iter(pooled.values())).mask}

    def _inputs(self, batch: Batch) -> Rows:
        keys = self._teacher.adapter.input_keys(self._teacher.policy, batch, self.recipe.wanted)
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


def _check_tokens(teacher: Checkpoint, stack: str, pooling: Pooling) -> None:
    adapter = teacher.adapter
    carried, prefix = adapter.tokens_of(stack), frozenset({"image", "text"})
    missing = required_tokens(pooling) - carried
    if not required_tokens(pooling) and carried.isdisjoint(prefix):
        # Poolings that name no kind take the image and text tokens, whichever there are.
        missing = prefix
    if missing:
        raise CraftError(
            f"The pooling {pooling} does not work for this policy.",
            why=f"the stack {stack} of {teacher.policy_type} has no "
            f"{' or '.join(sorted(missing))} tokens.",
            fix=f"use --pooling {adapter.pooling_of(stack)}.",
            exit_code=EXIT_USAGE,
        )


def row_seeds(seed: int, dataset_indices: NDArray[Any]) -> list[int]:
    """A seed for every row, the same whichever rows it is computed with."""
    return [
        int(np.random.SeedSequence([seed, int(index)]).generate_state(1, dtype=np.uint32)[0])
        for index in dataset_indices
    ]


def _stored(targets: Mapping[str, Tensor], dtype: str) -> Rows:
    """The arrays of the targets; a row that is not finite in one is invalid and zero in all."""
    numbers = {name: t for name, t in targets.items() if t.is_floating_point()}
    finite = [torch.isfinite(values).flatten(1).all(1) for values in numbers.values()]
    anything = next(iter(targets.values()))
    valid = torch.ones(len(anything), dtype=torch.bool, device=anything.device)
    valid = torch.stack([valid, *finite]).all(0)
    stored: Rows = {"valid": valid.cpu().numpy()}
    for name, values in targets.items():
        if name in numbers:
            values = torch.where(valid.reshape(-1, *[1] * (values.dim() - 1)), values, 0)
        array = values.cpu().numpy()
        stored[name] = encode(array, dtype) if name.startswith(HIDDEN) else array
    return stored
