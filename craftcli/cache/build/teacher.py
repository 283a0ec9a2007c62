"""Runs the teacher over the rows of a source and turns the results into the arrays of a cache."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from craftcli.cache.build.recipe import Recipe
from craftcli.cache.build.row_sources import RawRows, RowSource
from craftcli.cache.dtypes import encode
from craftcli.cache.format import (
    LABELS,
    OUTPUT_MASK,
    PREDICTION,
    TOP_LOGPROBS,
    TOP_TOKENS,
)
from craftcli.cache.inputs import UINT8_IMAGE, fits_bytes, pack
from craftcli.cache.storage.chunks import ArraySpec, RowArrays
from craftcli.choices import ActionSource, Images, Kind, Layout, OutputKind
from craftcli.policies.base import Batch, Features, PolicyAdapter, PolicyOutput
from craftcli.policies.lerobot.checkpoint import Checkpoint
from craftcli.policies.pooling import pool

HIDDEN = "hidden/"
_ACTION = "action"
"""Prefix of LeRobot's names of everything about actions."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Rows that were read and preprocessed; the teacher has not run on them yet."""

    index: RowArrays
    seeds: list[int]
    """A seed for each row, for what the policy draws at random."""
    batch: Batch
    finite: Tensor
    """Whether all numbers that were read of a row are finite: tokenizers hide those that are not.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """What the teacher was given, and what it answered, on its device."""

    inputs: dict[str, Tensor]
    """The model inputs by name."""
    targets: dict[str, Tensor]
    """Hidden states and outputs by array name."""
    valid: Tensor
    """Which rows have neither NaN nor infinity in what was read or answered [B] bool."""


class TeacherRows:
    """Runs the teacher over rows of a source.

    The result for a row depends on that row alone, not on the rows computed before.
    """

    def __init__(
        self,
        teacher: Checkpoint,
        source: RowSource,
        recipe: Recipe,
        *,
        images: Images = Images.EMBED,
    ) -> None:
        self._teacher = teacher
        self._source = source
        self.recipe = recipe
        teacher.policy.eval()
        # The first anchor decides how the images of all rows are packed.
        batch = self.prepare([0]).batch
        cameras = teacher.adapter.image_keys(teacher.policy, batch)
        self._as_bytes = {key for key in cameras if fits_bytes(batch[key].cpu())}
        self._left_out = frozenset(cameras if images is Images.REFERENCE else ())
        if recipe.layers and recipe.layout is None:
            self.recipe = replace(recipe, layout=self._find_layout())
        self.first = self.compute([0])
        """The arrays of the first anchor."""
        self.specs = self._specs(self.first)

    def compute(self, rows: Sequence[int]) -> RowArrays:
        """Compute the arrays of these rows of the source."""
        return self.run(self.prepare(rows))

    def prepare(self, rows: Sequence[int]) -> Prepared:
        """Read and preprocess rows; a thread can do this while the teacher runs."""
        return self.prepare_raw(self._source.read(rows))

    def prepare_raw(self, raw: RawRows) -> Prepared:
        """Preprocess rows of any source."""
        clean, finite = self._without_nan(raw.batch, len(raw.seeds))
        batch = self._teacher.preprocess(clean)
        return Prepared(index=raw.index, seeds=raw.seeds, batch=batch, finite=finite)

    @torch.no_grad()
    def run(self, prepared: Prepared) -> RowArrays:
        """Run the teacher on prepared rows and return their arrays."""
        answers = self.answer(prepared)
        inputs = {
            f"inputs/{key}": pack(values, as_bytes=key in self._as_bytes)
            for key, values in answers.inputs.items()
            if key not in self._left_out
        }
        return {**prepared.index, **_stored(answers, self.recipe.dtype), **inputs}

    @torch.no_grad()
    def answer(self, prepared: Prepared) -> Answers:
        """Run the teacher on prepared rows."""
        recipe, adapter, policy = self.recipe, self._teacher.adapter, self._teacher.policy
        batch = self._complete(prepared)
        features = adapter.features(policy, batch, recipe.request)
        targets = self._hidden(features) if recipe.layers else {}
        if features.output is not None:
            targets |= stored_outputs(
                adapter, batch, features.output, recipe.kinds, top_k=recipe.top_k
            )
        device = next(policy.parameters()).device
        keys = adapter.input_keys(policy, batch, recipe.request)
        return Answers(
            inputs={key: batch[key] for key in keys},
            targets=targets,
            valid=_finite_rows(targets) & prepared.finite.to(device),
        )

    def _without_nan(self, raw: Batch, count: int) -> tuple[Batch, Tensor]:
        """The rows with 0 for NaN and infinity, and for each row whether there was neither."""
        config, renames = self._teacher.policy.config, self._teacher.renames
        read = {**config.input_features, **config.output_features}
        clean, finite = dict(raw), torch.ones(count, dtype=torch.bool)
        for name, values in raw.items():
            number = isinstance(values, Tensor) and values.is_floating_point()
            if number and renames.get(name, name) in read and not torch.isfinite(values).all():
                finite &= torch.isfinite(values).flatten(1).all(1)
                clean[name] = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        return clean, finite

    def _complete(self, prepared: Prepared) -> Batch:
        """The batch as the teacher takes it, with everything that it would draw at random."""
        adapter, policy = self._teacher.adapter, self._teacher.policy
        # Decoding actions takes many forward passes; prefix states need no actions.
        read = adapter.input_keys(policy, prepared.batch, self.recipe.request)
        needs_actions = any(key.startswith(_ACTION) for key in read)
        return adapter.anchor_inputs(
            policy,
            prepared.batch,
            seeds=prepared.seeds,
            own_actions=needs_actions and self.recipe.actions is ActionSource.TEACHER,
        )

    @torch.no_grad()
    def _find_layout(self) -> Layout | None:
        return self._teacher.adapter.find_layout(
            self._teacher.policy, self._complete(self.prepare([0])), self.recipe.request
        )

    def _hidden(self, features: Features) -> dict[str, Tensor]:
        """The pooled states of every layer, and the mask of the vectors that exist."""
        recipe = self.recipe
        pooled = {
            layer: pool(features.hidden[layer], features.masks, recipe.pooling)
            for layer in recipe.layers
        }
        states = {f"{HIDDEN}{recipe.stack}.{layer}": p.vectors for layer, p in pooled.items()}
        return {**states, "hidden_mask": next(iter(pooled.values())).mask}

    def _specs(self, rows: RowArrays) -> dict[str, ArraySpec]:
        packed = {f"inputs/{key}" for key in self._as_bytes}
        return {
            name: ArraySpec(
                shape=values.shape[1:],
                dtype=str(values.dtype),
                attributes=UINT8_IMAGE if name in packed else {},
            )
            for name, values in rows.items()
        }


def _finite_rows(targets: Mapping[str, Tensor]) -> Tensor:
    """Which rows have neither NaN nor infinity in any target [B] bool."""
    anything = next(iter(targets.values()))
    valid = torch.ones(len(anything), dtype=torch.bool, device=anything.device)
    numbers = [values for values in targets.values() if values.is_floating_point()]
    finite = [torch.isfinite(values).flatten(1).all(1) for values in numbers]
    return torch.stack([valid, *finite]).all(0)


def _stored(answers: Answers, dtype: str) -> RowArrays:
    """The arrays of the answers; an invalid row is zero in all."""
    valid = answers.valid
    stored: RowArrays = {"valid": valid.cpu().numpy()}
    for name, values in answers.targets.items():
        if values.is_floating_point():
            values = torch.where(valid.reshape(-1, *[1] * (values.dim() - 1)), values, 0)
        array = values.cpu().numpy()
        stored[name] = encode(array, dtype) if name.startswith(HIDDEN) else array
    return stored


def stored_outputs(
    adapter: PolicyAdapter,
    batch: Batch,
    output: PolicyOutput,
    kinds: Collection[Kind],
    *,
    top_k: int,
) -> dict[str, Tensor]:
    """The arrays that are stored of the teacher's output for these kinds, row by row."""
    stored = {}
    if Kind.TOKEN_CE in kinds:
        stored[LABELS] = adapter.labels(batch)
    if Kind.ACTION in kinds:
        stored[OUTPUT_MASK] = output.mask
        if adapter.output_kind is OutputKind.VECTORS:
            stored[PREDICTION] = output.values.float()
        else:
            logprobs = torch.log_softmax(output.values.float(), dim=-1)
            kept = logprobs.topk(min(top_k, logprobs.shape[-1]), dim=-1)
            # Zeros for padding, which packed chunks do not store; the mask keeps it from the loss.
            counts = output.mask.unsqueeze(-1)
            stored[TOP_LOGPROBS] = torch.where(counts, kept.values, 0)
            stored[TOP_TOKENS] = torch.where(counts, kept.indices, 0).to(torch.int32)
    return stored
