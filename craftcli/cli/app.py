"""The `craft` command: its sub-commands, its help and its version."""

from typing import Annotated

import typer

from craftcli import __version__
from craftcli.cli import compare, dryrun, eval, info, inspect, merge, train
from craftcli.cli.cache.group import cache_app
from craftcli.cli.encoding import set_up_streams
from craftcli.cli.help import Group, examples_epilog
from craftcli.cli.quiet import set_up_threads

app = typer.Typer(
    cls=Group,
    name="craft",
    no_args_is_help=True,
    # All commands below inherit this.
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.add_typer(cache_app, name="cache")
for command in (dryrun, train, inspect, eval, compare, merge, info):
    command.register(app)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"craft {__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples_epilog(
        "craft dryrun", "craft cache build --layers -2,-1", "craft train --steps 20"
    )
)
def craft(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Fine-tune robot policies on a new task without forgetting the old ones.

    Without --policy and --dataset, every command runs on a built-in demo.
    """


def main() -> None:
    """Entry point of the `craft` script."""
    set_up_threads()
    set_up_streams()
    # By name: `python -m craftcli` is the same command, in its help and for shell completion.
    app(prog_name="craft")
