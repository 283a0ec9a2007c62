"""`craft cache export`: write a cache as one safetensors file."""

from pathlib import Path
from typing import Annotated

import typer

from craftcli.cli.cache.files import Overwrite
from craftcli.cli.options import AsJson, Debug, add_command, guarded, parse_location
from craftcli.cli.output import Output, size


def register(app: typer.Typer) -> None:
    """Add the command to `craft cache`."""
    add_command(
        app,
        "export",
        export,
        help="Write a cache as one safetensors file.",
        examples=(
            "craft cache export anchors.zarr",
            "craft cache export anchors.zarr -o states.safetensors --no-inputs",
        ),
    )


def export(
    path: Annotated[
        Path,
        typer.Argument(parser=parse_location, metavar="PATH", help="The cache: a folder or a URL."),
    ] = Path("anchors.zarr"),
    output_path: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="The file to write. Default: PATH with the ending .safetensors.",
        ),
    ] = None,
    inputs: Annotated[
        bool, typer.Option("--inputs/--no-inputs", help="Leave out the model inputs.")
    ] = True,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Export a cache."""

    def act(output: Output) -> None:
        from craftcli.cache.transfer.export import check_file, export_cache, plan_export

        beside = path if isinstance(path, Path) else Path(path.name)
        file = output_path or beside.with_suffix(".safetensors")
        check_file(file, overwrite=overwrite)
        plan = plan_export(path, inputs=inputs)
        rows, count = plan.reader.manifest.rows, len(plan.names)
        output.say(f"Writing {count} tensors of {rows} rows, {size(plan.payload_bytes)}, to {file}")
        with output.progress(rows * count, "rows", "Exporting") as advance:
            report = export_cache(plan, file, overwrite=overwrite, on_rows=advance)
        output.say(f"Wrote {file}: {size(report.size_bytes)}.")
        output.next(f"safetensors.torch.load_file({str(file)!r}) in Python reads it.")
        output.json(report.to_json())

    guarded(act, as_json=as_json, debug=debug)
