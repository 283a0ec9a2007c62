"""`craft cache import`: turn a prototype's folder of .pt shards into a cache."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from craftcli.cli.cache.files import CacheOutput, Overwrite
from craftcli.cli.next_steps import quote
from craftcli.cli.options import AsJson, Debug, add_command, guarded
from craftcli.cli.output import Output

if TYPE_CHECKING:
    from craftcli.cache.transfer.prototype_import import PrototypeContents


def register(app: typer.Typer) -> None:
    """Add the command to `craft cache`."""
    add_command(
        app,
        "import",
        import_folder,
        help="Turn a prototype's folder of .pt shards into a cache. No code in them is run.",
        examples=(
            "craft cache import data/anchor_cache",
            "craft cache import data/anchor_cache -o old.zarr --layer-count 18 --json",
        ),
    )


def import_folder(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="OLD_DIR", help="The folder with metadata.json and shard_0000.pt, ..."
        ),
    ],
    output_path: CacheOutput = Path("anchors.zarr"),
    layer_count: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of layers in the teacher's stack; PaliGemma's gemma_2b has 18.",
        ),
    ] = 18,
    trust_rows: Annotated[
        bool,
        typer.Option(
            "--trust-rows", help="Import the rows that exist, even if metadata.json counts others."
        ),
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Import a prototype's cache."""

    def act(output: Output) -> None:
        from craftcli.cache.storage.by_location import open_destination
        from craftcli.cache.transfer.prototype_import import import_prototype, survey_prototype

        open_destination(output_path).check(overwrite=overwrite, resume=False)
        with output.status(f"Reading {folder} ..."):
            contents = survey_prototype(folder, layer_count=layer_count, trust_rows=trust_rows)
        found = _to_json(contents)
        _show(contents, found, output)
        with output.progress(contents.rows, "rows", "Importing") as advance:
            report = import_prototype(contents, output_path, overwrite=overwrite, on_rows=advance)
        output.say(f"Wrote {output_path}: {report.rows} rows, {report.invalid_rows} not valid.")
        output.warn(
            "the prototypes did not record the weights of their teacher: craft train will refuse "
            "this cache for every policy."
        )
        output.next(f"craft cache inspect {quote(output_path)}")
        output.json({**found, **report.to_json()})

    guarded(act, as_json=as_json, debug=debug)


def _to_json(contents: "PrototypeContents") -> dict[str, Any]:
    targets = contents.targets
    return {
        "shards": len(contents.prototype.files),
        "rows": contents.rows,
        "counted": contents.prototype.counts,
        "target": targets.name,
        "kind": targets.kind,
        "layers": list(targets.layers),
        "layers_known": targets.layers_known,
        "pooling": targets.pooling,
        "vectors": targets.vectors,
        "dim": targets.dim,
        "dtype": targets.dtype,
        "images_as_bytes": contents.images_as_bytes,
        "teacher": contents.teacher,
        "dataset": contents.dataset,
    }


def _show(contents: "PrototypeContents", found: dict[str, Any], output: Output) -> None:
    targets = contents.targets
    counted = " and ".join(f"{name} {n}" for name, n in contents.prototype.counts.items())
    layers = ", ".join(map(str, targets.layers))
    guessed = "" if targets.layers_known else ", guessed: the prototype did not record them"
    rows = {
        "Rows": f"{contents.rows} in {found['shards']} shards; metadata: {counted or 'no count'}",
        "Holds": f"{targets.name}, for --mode {targets.kind}",
        "Images": "stored as bytes" if contents.images_as_bytes else "stored as floats, unchanged",
        "Teacher": f"{contents.teacher}, weights unknown",
        "Dataset": f"{contents.dataset}, frames unknown",
    }
    if targets.kind == "hidden":
        rows["Layers"] = f"{layers} of {targets.layer_count}{guessed}"
        rows["Pooling"] = f"{targets.pooling}: {targets.vectors} vectors of {targets.dim} a layer"
        rows["Stored as"] = targets.dtype
    output.table(f"Prototype cache {contents.prototype.folder}", rows)
