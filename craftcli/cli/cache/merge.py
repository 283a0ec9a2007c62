"""`craft cache merge`: join caches of the same teacher and settings."""

from pathlib import Path
from typing import Annotated

import typer

from craftcli.cli.cache.files import CacheOutput, Overwrite
from craftcli.cli.next_steps import quote
from craftcli.cli.options import AsJson, Debug, add_command, guarded, parse_location
from craftcli.cli.output import Output, size


def register(app: typer.Typer) -> None:
    """Add the command to `craft cache`."""
    add_command(
        app,
        "merge",
        merge,
        help="Join caches of the same teacher and settings into one. A frame that is in several "
        "of them is kept once.",
        examples=(
            "craft cache merge a.zarr b.zarr -o both.zarr",
            "craft cache merge first.zarr second.zarr --several-teachers -o both.zarr",
        ),
    )


def merge(
    paths: Annotated[
        list[Path],
        typer.Argument(
            parser=parse_location, metavar="CACHE", help="Caches to join; the rows keep this order."
        ),
    ],
    output_path: CacheOutput,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Keep frames that occur more than once.")
    ] = False,
    several_teachers: Annotated[
        bool,
        typer.Option(
            "--several-teachers",
            help="Join caches of one policy at several times, each with the skill that it had just "
            "learned. Train on them with --other-student.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Join caches."""

    def act(output: Output) -> None:
        from craftcli.cache.storage.by_location import open_destination
        from craftcli.cache.transfer.join import join_caches, plan_join

        open_destination(output_path).check(overwrite=overwrite, resume=False)
        plan = plan_join(paths, keep_duplicates=keep_duplicates, several_teachers=several_teachers)
        rows = plan.manifest.rows
        output.say(f"Writing {rows} rows, {size(plan.total_bytes)}, to {output_path}")
        with output.progress(rows, "rows", "Joining") as advance:
            report = join_caches(plan, output_path, overwrite=overwrite, on_rows=advance)
        counts = " + ".join(map(str, report.source_rows))
        output.say(f"Joined {counts} rows; left out {report.duplicates} duplicates.")
        output.next(f"craft cache inspect {quote(output_path)}")
        output.json(report.to_json())

    guarded(act, as_json=as_json, debug=debug)
