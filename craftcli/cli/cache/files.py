"""Options shared by the commands that write a cache, or a file from a cache."""

from pathlib import Path
from typing import Annotated

import typer

from craftcli.cli.options import parse_location

CacheOutput = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        parser=parse_location,
        metavar="PATH",
        help="Where to write the new cache: a folder or a URL.",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace what is there, once the new file is complete."),
]
