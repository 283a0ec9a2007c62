"""The `craft` command."""

from typing import Annotated

import typer

from craftcli import __version__
from craftcli.cli import cache, compare, dryrun, eval, info, merge, train
from craftcli.cli.options import epilog
from craftcli.cli.quiet import set_up_threads

app = typer.Typer(
    name="craft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(cache.app, name="cache")
train.register(app)
dryrun.register(app)
merge.register(app)
compare.register(app)
info.register(app)
eval.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"craft {__version__}")
        raise typer.Exit


@app.callback(
    epilog=epilog("craft dryrun", "craft cache build --layers -2,-1", "craft train --steps 20")
)
def craft(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print version."),
    ] = False,
) -> None:
    """Fine-tune robot policies on a new task without forgetting the old ones.

    Without --policy and --dataset, every command runs on a built-in demo.
    """


def main() -> None:
    """Entry point of the `craft` script."""
    set_up_threads()
    app()
