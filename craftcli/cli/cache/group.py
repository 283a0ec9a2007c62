"""`craft cache`: the group of its commands."""

import typer

from craftcli.cli.cache import build, export, import_prototype, inspect, merge
from craftcli.cli.help import Group, examples_epilog

cache_app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Build, inspect and convert caches of a teacher's hidden states and outputs.",
    epilog=examples_epilog(
        "craft cache build --layers -2,-1", "craft cache inspect anchors.zarr --json"
    ),
)
for command in (build, inspect, import_prototype, merge, export):
    command.register(cache_app)
