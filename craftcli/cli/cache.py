"""`craft cache`: build anchor caches and look into them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from craftcli.cli import cache_tools, inspect
from craftcli.cli.options import epilog, settings_command, warn_of_unused
from craftcli.cli.output import Output, size
from craftcli.cli.quiet import quiet_libraries
from craftcli.config import CacheConfig
from craftcli.settings import Source
from craftcli.unused import unused_in_building

if TYPE_CHECKING:
    from craftcli.cache.build import BuildPlan, BuildReport

app = typer.Typer(
    no_args_is_help=True,
    help="Build and inspect caches of a teacher's hidden states and outputs.",
    epilog=epilog("craft cache build --layers -2,-1", "craft cache inspect anchors.zarr --json"),
)


@settings_command(
    app,
    "build",
    CacheConfig,
    help="Run the teacher over anchor samples of the old data and store what it computes.",
    examples=(
        "craft cache build --layers -2,-1",
        "craft cache build --policy outputs/my_policy --dataset me/old_task --samples 1024",
    ),
)
def build(source: Source[CacheConfig], output: Output) -> None:
    """Build a cache."""
    from craftcli.cache.processes import Processes
    from craftcli.cache.sites import open_site

    config = source.settings
    quiet_libraries(debug=output.debug)
    if not Processes.from_environment().is_first:
        _assist(config)
        return
    open_site(config.output).check(overwrite=config.overwrite, resume=config.resume)
    with output.status("Loading the policy ..."):
        from craftcli.cache.build import build_cache
        from craftcli.cache.reader import CacheReader
        from craftcli.cache.summary import summarize
        from craftcli.demo.datasets import OLD
        from craftcli.engine.session import data_status, open_anchor_data, open_policy

        teacher = open_policy(config)
    with output.status(data_status(config, OLD)):
        dataset = open_anchor_data(config, teacher)
    if config.is_demo:
        output.note("Using the built-in demo: its policy as teacher, its old task as data.")

    def announce(plan: "BuildPlan") -> None:
        kinds, predicted = plan.recipe.kinds, teacher.adapter.output_kind
        warn_of_unused(unused_in_building(kinds, source.given, output=predicted), output)
        _announce(plan, config, output)

    with output.progress(config.samples, "rows") as advance, _told_what_is_kept(config, output):
        report = build_cache(config, teacher, dataset, on_plan=announce, on_rows=advance)
    summary = summarize(CacheReader.open(config.output))
    _warn_of_invalid(report, output)
    output.say(f"Wrote {config.output}: {summary.rows} rows, {size(summary.size_bytes)} on disk.")
    output.note("Next: craft cache inspect, then craft train.")
    output.json(
        {
            **summary.to_json(),
            "invalid_indices": list(report.invalid),
            "chunks_reused": report.reused,
        }
    )


def _assist(config: CacheConfig) -> None:
    """Compute a share of the chunks beside the first process, which does the talking."""
    from craftcli.cache.build import build_cache
    from craftcli.engine.session import open_anchor_data, open_policy

    teacher = open_policy(config)
    dataset = open_anchor_data(config, teacher)
    build_cache(config, teacher, dataset, on_plan=lambda _: None, on_rows=lambda _: None)


@contextmanager
def _told_what_is_kept(config: CacheConfig, output: Output) -> Iterator[None]:
    """Say what a build that breaks off leaves to go on with."""
    from craftcli.cache.remote import StoreGoneError
    from craftcli.cache.sites import open_site

    site = open_site(config.output)
    before = site.unfinished()
    try:
        yield
    except StoreGoneError:
        # Nobody can look what is there now; the error says how to go on.
        raise
    except BaseException:
        kept = site.unfinished()
        if kept and kept != before:
            output.note(f"Kept {kept}: craft cache build --resume goes on from there.")
        raise


def _warn_of_invalid(report: "BuildReport", output: Output) -> None:
    if report.invalid:
        first = ", ".join(map(str, report.invalid[:5]))
        output.warn(
            f"{len(report.invalid)} of {report.rows} rows are not finite and will not be trained "
            f"on: dataset frames {first}{' ...' if len(report.invalid) > 5 else ''}."
        )


def _announce(plan: "BuildPlan", config: CacheConfig, output: Output) -> None:
    recipe = plan.recipe
    layers = ", ".join(f"{n} ({n - recipe.layer_count})" for n in recipe.layers)
    output.say(
        f"Storing {plan.rows} rows of about {size(plan.bytes_per_row)}, "
        f"{size(plan.total_bytes)} in all, to {config.output}"
    )
    # Found by shape, perhaps: tokens and numbers cannot be told apart by it.
    lie = f" (its states lie as {recipe.layout})" if recipe.layout else ""
    output.say(
        f"Layers {layers} of {recipe.layer_count} in stack {recipe.stack}{lie}, "
        f"pooling {recipe.pooling}, {recipe.dtype}"
    )


inspect.register(app)
cache_tools.register(app)
