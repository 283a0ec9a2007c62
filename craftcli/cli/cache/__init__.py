"""The commands of `craft cache`, one module each.

build             run the teacher over anchor samples and store what it computes
inspect           show what a cache holds, check it, draw it (its tables: inspect_tables)
import_prototype  turn a prototype's folder of .pt shards into a cache
merge             join caches of the same teacher and settings
export            write a cache as one safetensors file
files             options shared by the commands that write a file
"""

import typer

from craftcli.cli.cache import build, export, import_prototype, inspect, merge
from craftcli.cli.help import Group, examples_epilog

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Build, inspect and convert caches of a teacher's hidden states and outputs.",
    epilog=examples_epilog(
        "craft cache build --layers -2,-1", "craft cache inspect anchors.zarr --json"
    ),
)
for command in (build, inspect, import_prototype, merge, export):
    command.register(app)

__all__ = ["app"]
