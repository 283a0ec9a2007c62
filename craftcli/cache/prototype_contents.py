"""What a prototype's folder holds: every shard is read and checked before anything is copied."""

from dataclasses import dataclass
from pathlib import Path

from craftcli.cache.chunks import ArraySpec
from craftcli.cache.prototype_targets import Targets, describe_targets
from craftcli.cache.prototypes import INPUTS, Prototype, Shard, open_prototype
from craftcli.cache.regrouping import Rows
from craftcli.errors import CraftError

GEMMA_2B_LAYERS = 18
"""Depth of PaliGemma's language model, which the prototypes' teachers have."""
_IMAGES = "pixel_values"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a prototype's folder holds."""

    prototype: Prototype
    rows: int
    """Rows that are there, whatever the metadata says."""
    targets: Targets
    images_as_bytes: bool
    """Whether every image is bytes / 255, so that a byte a value loses nothing."""
    specs: dict[str, ArraySpec]
    """The arrays of inputs and outputs."""

    @property
    def teacher(self) -> str:
        """Where the teacher came from, or the folder's name when nobody wrote it down."""
        names = ("teacher_policy_path", "policy_pretrained_path", "model_name", "model", "teacher")
        return self.prototype.field(*names, kind=str) or self.prototype.folder.resolve().name

    @property
    def dataset(self) -> str:
        """Name of the dataset, or the folder's."""
        names = ("dataset_repo_id", "dataset")
        return self.prototype.field(*names, kind=str) or self.prototype.folder.resolve().name

    def inputs(self, shard: Shard) -> Rows:
        """The arrays of a shard's model inputs."""
        return _inputs(shard, images_as_bytes=self.images_as_bytes)


def look_through(
    folder: Path, *, layer_count: int = GEMMA_2B_LAYERS, trust_rows: bool = False
) -> Contents:
    """Read every shard once and check that they fit together; nothing is written.

    `layer_count` is the depth of the teacher's stack, for layers counted from its end. `trust_rows`
    takes the rows that are there when the metadata counts others.

    Raises:
        CraftError: a shard cannot be loaded safely or is unlike the others, or rows are missing.
    """
    from craftcli.cache.inputs import fits_bytes

    prototype = open_prototype(folder)
    first: Shard | None = None
    rows, as_bytes = 0, True
    for shard in prototype.shards():
        first = first or shard
        _check_alike(first, shard)
        rows += shard.rows
        as_bytes = as_bytes and fits_bytes(shard.tensors[_IMAGES])
    if first is None or rows == 0:
        raise CraftError(
            f"{folder} has no rows.",
            why="all of its shards are empty.",
            fix="build a new cache with craft cache build.",
        )
    if not trust_rows:
        _check_count(prototype, rows)
    targets = describe_targets(prototype, first, layer_count)
    return Contents(
        prototype=prototype,
        rows=rows,
        targets=targets,
        images_as_bytes=as_bytes,
        specs={**_input_specs(first, images_as_bytes=as_bytes), **targets.specs},
    )


def _inputs(shard: Shard, *, images_as_bytes: bool) -> Rows:
    from craftcli.cache.inputs import pack

    return {
        f"inputs/{name}": pack(shard.tensors[name], as_bytes=images_as_bytes and name == _IMAGES)
        for name in INPUTS
    }


def _input_specs(shard: Shard, *, images_as_bytes: bool) -> dict[str, ArraySpec]:
    from craftcli.cache.inputs import UINT8_IMAGE

    packed = f"inputs/{_IMAGES}" if images_as_bytes else None
    return {
        name: ArraySpec(
            shape=values.shape[1:],
            dtype=str(values.dtype),
            attributes=UINT8_IMAGE if name == packed else {},
        )
        for name, values in _inputs(shard, images_as_bytes=images_as_bytes).items()
    }


def _check_alike(first: Shard, shard: Shard) -> None:
    ours, others = shard.layout, first.layout
    differing = [
        f"{name} has rows of {ours.get(name, 'nothing')} and of {others.get(name, 'nothing')} there"
        for name in sorted(ours.keys() | others.keys())
        if ours.get(name) != others.get(name)
    ]
    if differing:
        raise CraftError(
            f"{shard.path.name} and {first.path.name} do not belong together.",
            why=f"{'; '.join(differing)}.",
            fix="import the shards of one build at a time.",
        )


def _check_count(prototype: Prototype, rows: int) -> None:
    wrong = {name: count for name, count in prototype.counts.items() if count != rows}
    if wrong:
        counted = " and ".join(f"{name} = {count}" for name, count in wrong.items())
        raise CraftError(
            f"The rows of {prototype.folder} are not those its metadata counts.",
            why=f"metadata.json says {counted}, and the shards hold {rows} rows.",
            fix="look for lost shards, or take what is there with --trust-rows.",
        )
