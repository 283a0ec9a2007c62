"""A prototype's cache folder as a craft cache, copied shard by shard.

What the prototypes did not record stays unknown: the digests of teacher and dataset are empty, and
the index says only which row it was.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from craftcli import __version__
from craftcli.cache.format import DatasetIdentity, Manifest, TeacherIdentity, rows_per_chunk
from craftcli.cache.prototype_contents import Contents
from craftcli.cache.prototypes import Shard
from craftcli.cache.regrouping import Rows, write_all
from craftcli.cache.store import required_arrays
from craftcli.cache.writer import CacheWriter
from craftcli.locations import Location

TASK = "imported"


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What was imported."""

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


def import_prototype(
    contents: Contents, output: Location, *, overwrite: bool, on_rows: Callable[[int], None]
) -> ImportReport:
    """Copy the rows into a new cache at `output`; rows that are not usable are marked invalid."""
    manifest = _manifest(contents)
    invalid = 0

    def parts() -> Iterator[Rows]:
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


def _rows(shard: Shard, contents: Contents, *, first: int) -> Rows:
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


def _manifest(contents: Contents) -> Manifest:
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
