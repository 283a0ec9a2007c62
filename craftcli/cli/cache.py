"""`craft cache`: build anchor caches and look into them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from craftcli.cli.options import AsJson, Debug, epilog, guarded, settings_command
from craftcli.cli.output import Output, size
from craftcli.cli.quiet import quiet_libraries
from craftcli.config import CacheConfig, Source
from craftcli.errors import EXIT_CHECK_FAILED, CraftError

if TYPE_CHECKING:
    from craftcli.cache.build import BuildPlan
    from craftcli.cache.summary import CacheSummary

app = typer.Typer(
    no_args_is_help=True,
    help="Build and inspect caches of a teacher's hidden states.",
    epilog=epilog("craft cache build --layers -2,-1", "craft cache inspect anchors.zarr --json"),
)


@settings_command(
    app,
    "build",
    CacheConfig,
    help="Run the teacher over anchor samples of the old data and store its hidden states.",
    examples=(
        "craft cache build --layers -2,-1",
        "craft cache build --policy outputs/my_policy --dataset me/old_task --samples 1024",
    ),
)
def build(source: Source[CacheConfig], output: Output) -> None:
    """Build a cache."""
    config = source.settings
    with output.status("Loading the policy ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.cache.build import build_cache
        from craftcli.cache.places import check_destination
        from craftcli.cache.reader import CacheReader
        from craftcli.cache.summary import summarize
        from craftcli.demo.datasets import OLD
        from craftcli.engine.session import data_status, open_anchor_data, open_policy

        check_destination(config.output, overwrite=config.overwrite)
        teacher = open_policy(config)
    with output.status(data_status(config, OLD)):
        dataset = open_anchor_data(config, teacher)
    if config.is_demo:
        output.note("Using the built-in demo: its policy as teacher, its old task as data.")
    with output.progress(config.samples, "rows") as advance:
        build_cache(
            config,
            teacher,
            dataset,
            on_plan=lambda plan: _announce(plan, config, output),
            on_rows=advance,
        )
    summary = summarize(CacheReader.open(config.output))
    output.say(f"Wrote {config.output}: {summary.rows} rows, {size(summary.size_bytes)} on disk.")
    output.note("Next: craft cache inspect, then craft train --mode hidden.")
    output.json(summary.to_json())


def _announce(plan: "BuildPlan", config: CacheConfig, output: Output) -> None:
    recipe = plan.recipe
    layers = ", ".join(f"{n} ({n - recipe.layer_count})" for n in recipe.layers)
    output.say(
        f"Storing {plan.rows} rows of about {size(plan.bytes_per_row)}, "
        f"{size(plan.total_bytes)} in all, to {config.output}"
    )
    output.say(
        f"Layers {layers} of {recipe.layer_count} in stack {recipe.stack}, "
        f"pooling {recipe.pooling}, {recipe.dtype}"
    )


@app.command(
    help="Show what a cache holds and where it came from.",
    epilog=epilog("craft cache inspect", "craft cache inspect anchors.zarr --verify --json"),
)
def inspect(
    path: Annotated[Path, typer.Argument(help="The cache.")] = Path("anchors.zarr"),
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every chunk against its checksum.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show a cache."""

    def act(output: Output) -> None:
        from craftcli.cache.reader import CacheReader
        from craftcli.cache.summary import summarize

        reader = CacheReader.open(path)
        if verify:
            _require_sound(reader.verify(), path)
        summary = summarize(reader)
        _show(summary, output)
        if verify:
            output.say(f"Verified: all {summary.chunks} chunks match their checksums.")
        output.json({**summary.to_json(), "verified": verify})

    guarded(act, as_json=as_json, debug=debug)


def _require_sound(problems: list[str], path: Path) -> None:
    if problems:
        raise CraftError(
            f"The cache {path} is damaged.",
            why="; ".join(problems) + ".",
            fix="rebuild it with craft cache build --overwrite.",
            exit_code=EXIT_CHECK_FAILED,
        )


def _show(summary: "CacheSummary", output: Output) -> None:
    teacher, dataset = summary.teacher, summary.dataset
    output.table(
        f"Cache {summary.path}",
        {
            "Rows": f"{summary.rows} ({summary.valid_rows} valid) in {summary.chunks} chunks",
            "Complete": "yes" if summary.complete else "no",
            "Layers": f"{', '.join(map(str, summary.layers))} of {summary.layer_count} "
            f"in stack {summary.stack}",
            "Pooling": f"{summary.pooling}: {summary.vectors} vectors of {summary.dim} a layer",
            "Stored as": f"{summary.dtype}, images {summary.images}",
            "Size": f"{size(summary.size_bytes)}, {size(round(summary.bytes_per_row))} a row",
            "Teacher": f"{teacher.source} ({teacher.policy_type}, {teacher.dtype}), "
            f"weights {teacher.weights_digest[:12]}",
            "Dataset": f"{dataset.repo_id}: {dataset.episodes} episodes, {dataset.frames} frames, "
            f"fingerprint {dataset.fingerprint[:12]}",
            "Selection": f"{summary.sampling}, seed {summary.seed}, "
            f"{summary.episodes} episodes sampled",
            "Built": f"{summary.created} with "
            + ", ".join(f"{name} {version}" for name, version in summary.versions.items()),
        },
    )
    output.table(
        "Norm of the hidden states",
        {
            norms.layer: f"mean {norms.mean:.3f}, std {norms.std:.3f}, "
            f"range {norms.min:.3f} to {norms.max:.3f}, variance {norms.scalar_variance:.4g}"
            for norms in summary.layer_norms
        },
    )
    output.table("Rows by task", {task: str(rows) for task, rows in summary.tasks.items()})
