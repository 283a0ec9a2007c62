"""Imports the cache folder of a CRaFT prototype, shard by shard.

Every shard is read and checked before anything is written. What the prototypes did not record stays
unknown: the digests of teacher and dataset are empty, and the index holds only the row's number.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from craftcli import __version__
from craftcli.cache.format import Manifest, rows_per_chunk
from craftcli.cache.storage.chunks import ArraySpec, RowArrays
from craftcli.cache.storage.zarr_layout import required_arrays
from craftcli.cache.transfer.prototype_files import INPUTS, Prototype, Shard, open_prototype
from craftcli.cache.transfer.prototype_targets import PrototypeTargets, read_targets
from craftcli.cache.transfer.rechunk import write_all
from craftcli.cache.writing.writer import CacheWriter
from craftcli.errors import CraftError
from craftcli.locations import Location
from craftcli.policies.identity import DatasetIdentity, TeacherIdentity

TASK = "imported"
"""The one task of an imported cache; the prototypes recorded none."""
GEMMA_2B_LAYERS = 18
"""Depth of PaliGemma's language model, which the prototypes' teachers have."""
_IMAGES = "pixel_values"


@dataclass(frozen=True, kw_only=True)
class PrototypeContents:
    """The contents of a prototype's folder, after every shard was read."""

    prototype: Prototype
    rows: int
    """Rows in the shards; the metadata may count others."""
    targets: PrototypeTargets
    images_as_bytes: bool
    """Whether every image is bytes / 255, so that it can be stored as bytes without loss."""
    specs: dict[str, ArraySpec]
    """The arrays of inputs and outputs."""

    @property
    def teacher(self) -> str:
        """Source of the teacher, or the folder's name if it was not recorded."""
        names = ("teacher_policy_path", "policy_pretrained_path", "model_name", "model", "teacher")
        return self.prototype.field(*names, kind=str) or self.prototype.folder.resolve().name

    @property
    def dataset(self) -> str:
        """Name of the dataset, or the folder's name if it was not recorded."""
        names = ("dataset_repo_id", "dataset")
        return self.prototype.field(*names, kind=str) or self.prototype.folder.resolve().name

    def inputs(self, shard: Shard) -> RowArrays:
        """The arrays of a shard's model inputs."""
        return _inputs(shard, images_as_bytes=self.images_as_bytes)


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """The result of an import."""

    source: str
    """The prototype's folder."""
    output: str
    """The cache."""
    rows: int
    invalid_rows: int
    """Rows with a value that is not finite, or without a label."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def survey_prototype(
    folder: Path, *, layer_count: int = GEMMA_2B_LAYERS, trust_rows: bool = False
) -> PrototypeContents:
    """Read every shard once and check that they fit together; nothing is written.

    `layer_count` is the depth of the teacher's stack, for layers counted from its end. With
    `trust_rows`, a wrong number of rows in the metadata is ignored.

    Raises:
        CraftError: a shard cannot be loaded safely or differs from the others, or rows are missing.
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
    targets = read_targets(prototype, first, layer_count)
    return PrototypeContents(
        prototype=prototype,
        rows=rows,
        targets=targets,
        images_as_bytes=as_bytes,
        specs={**_input_specs(first, images_as_bytes=as_bytes), **targets.specs},
    )


def import_prototype(
    contents: PrototypeContents,
    output: Location,
    *,
    overwrite: bool,
    on_rows: Callable[[int], None],
) -> ImportReport:
    """Copy the rows into a new cache at `output`; unusable rows are marked invalid."""
    manifest = _manifest(contents)
    invalid = 0

    def parts() -> Iterator[RowArrays]:
        nonlocal invalid
        done = 0
        for shard in contents.prototype.shards():
            rows = _rows(shard, contents, first=done)
            done += shard.rows
            invalid += int((~rows["valid"]).sum())
            yield rows

    arrays = {**required_arrays(manifest), **contents.specs}
    with CacheWriter.create(output, manifest, arrays, tasks=[TASK], overwrite=overwrite) as writer:
        write_all(writer, parts(), on_rows)
    return ImportReport(
        source=str(contents.prototype.folder),
        output=str(output),
        rows=contents.rows,
        invalid_rows=invalid,
    )


def _inputs(shard: Shard, *, images_as_bytes: bool) -> RowArrays:
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
            f"{prototype.folder} has another number of rows than its metadata counts.",
            why=f"metadata.json has {counted}, and the shards hold {rows} rows.",
            fix="look for lost shards, or import the rows that are there with --trust-rows.",
        )


def _rows(shard: Shard, contents: PrototypeContents, *, first: int) -> RowArrays:
    zeros = np.zeros(shard.rows, np.int64)
    inputs = contents.inputs(shard)
    targets, usable = contents.targets.convert(shard)
    for values in inputs.values():
        usable &= np.isfinite(values).reshape(shard.rows, -1).all(axis=1)
    return {
        **inputs,
        **targets,
        "index/dataset_index": np.arange(first, first + shard.rows, dtype=np.int64),
        "index/episode": zeros,
        "index/frame": zeros,
        "index/task": zeros,
        "valid": usable,
    }


def _manifest(contents: PrototypeContents) -> Manifest:
    targets = contents.targets
    arrays = [*contents.specs.values()]
    widest = max(spec.row_bytes for spec in arrays)
    return Manifest(
        kinds=(targets.kind,),
        complete=False,
        rows=contents.rows,
        rows_per_chunk=rows_per_chunk(widest, contents.rows),
        stack=targets.stack,
        layers=targets.layers,
        layer_count=targets.layer_count,
        pooling=targets.pooling,
        vectors=targets.vectors,
        dim=targets.dim,
        dtype=targets.dtype,
        images="embedded",
        sampling="uniform",
        prompts_digest=None,
        seed=contents.prototype.field("seed", kind=int) or 0,
        teacher=TeacherIdentity(
            source=contents.teacher,
            revision=None,
            policy_type="",
            weights_digest="",
            config_digest="",
            processor_digest="",
            dtype="",
        ),
        dataset=DatasetIdentity(
            repo_id=contents.dataset,
            root=None,
            revision=None,
            fingerprint="",
            episodes=0,
            frames=0,
            selection_digest="",
        ),
        versions={"craftcli": __version__},
    )
