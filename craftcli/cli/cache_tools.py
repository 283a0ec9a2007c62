"""`craft cache import`, `merge` and `export`: caches from and to other files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from craftcli.cli.options import AsJson, Debug, epilog, guarded, parse_location
from craftcli.cli.output import Output, size

if TYPE_CHECKING:
    from craftcli.cache.prototype_contents import Contents

_AT: dict[str, Any] = {"parser": parse_location, "metavar": "PATH"}
CachePath = Annotated[
    Path, typer.Option("-o", "--output", **_AT, help="Where the new cache is written.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace what is there once the new file is whole.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to `craft cache`."""
    app.command(
        "import",
        help="Turn a prototype's folder of .pt shards into a cache, running no code in them.",
        epilog=epilog(
            "craft cache import data/anchor_cache",
            "craft cache import data/anchor_cache -o old.zarr --layer-count 18 --json",
        ),
    )(import_folder)
    app.command(
        "merge",
        help="Put caches of the same teacher and settings together, each frame once.",
        epilog=epilog("craft cache merge a.zarr b.zarr -o both.zarr"),
    )(merge)
    app.command(
        "export",
        help="Write a cache as one safetensors file.",
        epilog=epilog(
            "craft cache export anchors.zarr",
            "craft cache export anchors.zarr -o states.safetensors --no-inputs",
        ),
    )(export)


def import_folder(
    folder: Annotated[
        Path, typer.Argument(metavar="OLD_DIR", help="Holds metadata.json and shard_0000.pt.")
    ],
    output_path: CachePath = Path("anchors.zarr"),
    layer_count: Annotated[
        int,
        typer.Option(min=1, help="Layers of the teacher's stack; 18 is PaliGemma's gemma_2b."),
    ] = 18,
    trust_rows: Annotated[
        bool, typer.Option("--trust-rows", help="Take the rows there are, whatever the count says.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Import a prototype's cache."""

    def act(output: Output) -> None:
        from craftcli.cache.importing import import_prototype
        from craftcli.cache.prototype_contents import look_through
        from craftcli.cache.sites import open_site

        open_site(output_path).check(overwrite=overwrite, resume=False)
        with output.status(f"Reading {folder} ..."):
            contents = look_through(folder, layer_count=layer_count, trust_rows=trust_rows)
        found = _describe(contents)
        _show(contents, found, output)
        with output.progress(contents.rows, "rows") as advance:
            report = import_prototype(contents, output_path, overwrite=overwrite, on_rows=advance)
        output.say(f"Wrote {output_path}: {report.rows} rows, {report.invalid_rows} not valid.")
        output.warn(
            "the prototypes did not record which weights their teacher had: craft train will not "
            "take this cache for the teacher of any policy."
        )
        output.json({**found, **report.to_json()})

    guarded(act, as_json=as_json, debug=debug)


def merge(
    paths: Annotated[
        list[Path],
        typer.Argument(parser=parse_location, metavar="A B ...", help="The caches, in order."),
    ],
    output_path: CachePath,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Keep frames that come more than once.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Merge caches."""

    def act(output: Output) -> None:
        from craftcli.cache.merging import merge_caches, plan_merge
        from craftcli.cache.sites import open_site

        open_site(output_path).check(overwrite=overwrite, resume=False)
        plan = plan_merge(paths, keep_duplicates=keep_duplicates)
        rows = plan.manifest.rows
        output.say(f"Writing {rows} rows, {size(rows * plan.bytes_per_row)}, to {output_path}")
        with output.progress(rows, "rows") as advance:
            report = merge_caches(plan, output_path, overwrite=overwrite, on_rows=advance)
        counts = " + ".join(map(str, report.source_rows))
        output.say(f"Merged {counts} rows, {report.duplicates} of them there already.")
        output.json(report.to_json())

    guarded(act, as_json=as_json, debug=debug)


def export(
    path: Annotated[Path, typer.Argument(**_AT, help="The cache.")] = Path("anchors.zarr"),
    output_path: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The file. Without it: PATH, ending in .safetensors."),
    ] = None,
    inputs: Annotated[
        bool, typer.Option("--inputs/--no-inputs", help="Whether to write the model inputs.")
    ] = True,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Export a cache."""

    def act(output: Output) -> None:
        from craftcli.cache.exporting import check_file, export_cache, plan_export

        beside = path if isinstance(path, Path) else Path(path.name)
        file = output_path or beside.with_suffix(".safetensors")
        check_file(file, overwrite=overwrite)
        plan = plan_export(path, inputs=inputs)
        rows, count = plan.reader.manifest.rows, len(plan.names)
        output.say(f"Writing {count} tensors of {rows} rows, {size(plan.payload_bytes)}, to {file}")
        with output.progress(rows * count, "rows") as advance:
            report = export_cache(plan, file, overwrite=overwrite, on_rows=advance)
        output.say(f"Wrote {file}: {size(report.size_bytes)}.")
        output.json(report.to_json())

    guarded(act, as_json=as_json, debug=debug)


def _describe(contents: "Contents") -> dict[str, Any]:
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


def _show(contents: "Contents", found: dict[str, Any], output: Output) -> None:
    targets = contents.targets
    counted = " and ".join(f"{name} {n}" for name, n in contents.prototype.counts.items())
    layers = ", ".join(map(str, targets.layers))
    guessed = "" if targets.layers_known else ", guessed: nobody wrote them down"
    rows = {
        "Rows": f"{contents.rows} in {found['shards']} shards; metadata: {counted or 'no count'}",
        "Holds": f"{targets.name}, for --mode {targets.kind}",
        "Images": "stored as bytes" if contents.images_as_bytes else "stored as they are, floats",
        "Teacher": f"{contents.teacher}, weights unknown",
        "Dataset": f"{contents.dataset}, frames unknown",
    }
    if targets.kind == "hidden":
        rows["Layers"] = f"{layers} of {targets.layer_count}{guessed}"
        rows["Pooling"] = f"{targets.pooling}: {targets.vectors} vectors of {targets.dim} a layer"
        rows["Stored as"] = targets.dtype
    output.table(f"Prototype cache {contents.prototype.folder}", rows)
