"""`craft cache inspect`: what a cache holds, whether it is sound, and whose it is."""

from pathlib import Path
from typing import Annotated

import typer

from craftcli.cli.inspection import VERIFY_ROWS, Asked, run
from craftcli.cli.options import AsJson, Debug, epilog, guarded, parse_location
from craftcli.cli.output import Output

_AT_HAND = "Policy and data"


def register(app: typer.Typer) -> None:
    """Add the command to `craft cache`."""
    app.command(
        "inspect",
        help="Show what a cache holds and where it came from, check it, or draw it.",
        epilog=epilog(
            "craft cache inspect",
            "craft cache inspect anchors.zarr --verify --json",
            "craft cache inspect anchors.zarr --policy outputs/my_policy --dataset me/old_task",
            "craft cache inspect anchors.zarr --plot anchors.png",
        ),
    )(inspect)


def inspect(
    path: Annotated[
        Path,
        typer.Argument(parser=parse_location, metavar="PATH", help="The cache: a folder or a URL."),
    ] = Path("anchors.zarr"),
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Check every chunk, and run the teacher again over a few rows."
        ),
    ] = False,
    verify_rows: Annotated[
        int | None,
        typer.Option(
            help=f"Rows --verify runs the teacher over: {VERIFY_ROWS} unless said, 0 for none.",
            min=0,
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the cache into this PNG.", metavar="FILE.png")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "--policy.path",
            help="Compare the teacher with this policy: a folder, a run, a Hub name, or demo.",
            rich_help_panel=_AT_HAND,
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="Revision of a policy on the Hub.", rich_help_panel=_AT_HAND),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            "--dataset.repo_id",
            help="Compare the dataset with this one: a folder, a Hub name, or demo.",
            rich_help_panel=_AT_HAND,
        ),
    ] = None,
    dataset_root: Annotated[
        str | None,
        typer.Option(
            "--dataset-root",
            "--dataset.root",
            help="Folder of the dataset when it is not under its Hub name.",
            rich_help_panel=_AT_HAND,
        ),
    ] = None,
    dataset_revision: Annotated[
        str | None,
        typer.Option(
            "--dataset-revision",
            "--dataset.revision",
            help="Revision of a dataset on the Hub.",
            rich_help_panel=_AT_HAND,
        ),
    ] = None,
    rename: Annotated[
        str | None,
        typer.Option(
            help="What the cache was built with: the dataset's names for what the policy calls "
            "otherwise.",
            rich_help_panel=_AT_HAND,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run Python code that comes with the policy's tokenizers.",
            rich_help_panel=_AT_HAND,
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Where the policy runs: cpu, cuda, cuda:1, mps, or auto (as without)."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show a cache."""

    def act(output: Output) -> None:
        asked = Asked(
            path=path,
            verify=verify,
            verify_rows=verify_rows,
            plot=plot,
            policy=policy,
            revision=revision,
            dataset=dataset,
            dataset_root=dataset_root,
            dataset_revision=dataset_revision,
            rename=rename,
            trust_remote_code=trust_remote_code,
            device=device,
        )
        run(asked, output)

    guarded(act, as_json=as_json, debug=debug)
