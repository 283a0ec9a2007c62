"""`craft cache build`: run the teacher over anchor samples and store what it computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from craftcli.cli.disk_space import require_space
from craftcli.cli.early_checks import check_building
from craftcli.cli.next_steps import after_build
from craftcli.cli.options import add_settings_command, warn_of_unused
from craftcli.cli.output import Output, size
from craftcli.cli.quiet import quiet_libraries
from craftcli.cli.recording import record_episodes
from craftcli.cli.settings_table import show_settings
from craftcli.config.cache import CacheConfig
from craftcli.config.settings import Source
from craftcli.config.unused import unused_in_building

if TYPE_CHECKING:
    from craftcli.cache.build.build import BuildPlan, BuildReport
    from craftcli.policies.lerobot.checkpoint import Checkpoint

_LARGE = 100_000_000
"""Bytes of a cache from which on it is said what would make it smaller."""


def register(app: typer.Typer) -> None:
    """Add the command to `craft cache`."""
    add_settings_command(
        app,
        "build",
        CacheConfig,
        build,
        help="Run the teacher over anchor samples of the old data and store what it computes.\n\n"
        "The teacher is the policy before fine-tuning.",
        examples=(
            "craft cache build --layers -2,-1",
            "craft cache build --policy outputs/my_policy --dataset me/old_task --samples 1024",
            "craft cache build --policy me/base --dataset me/old_task --samples 16 --augment 63",
            "craft cache build --policy me/base --from-statistics --samples 4096",
            "craft cache build --policy me/base --env metaworld:pick-place-v3 --env-episodes 20",
        ),
        main=(
            "policy",
            "dataset",
            "output",
            "samples",
            "kind",
            "layers",
            "pooling",
            "batch_size",
            "overwrite",
            "resume",
        ),
    )


def build(source: Source[CacheConfig], output: Output) -> None:
    """Build a cache; under torchrun every process computes a share, and the first one prints."""
    from craftcli.cache.storage.by_location import open_destination
    from craftcli.distributed import Processes

    config = source.settings
    quiet_libraries(debug=output.debug)
    if not Processes.from_environment().is_first:
        _assist(config)
        return
    open_destination(config.output).check(overwrite=config.overwrite, resume=config.resume)
    check_building(config)
    with output.status("Loading the policy ..."):
        from craftcli.cache.build.build import build_cache
        from craftcli.cache.reading.reader import CacheReader
        from craftcli.cache.summary import summarize
        from craftcli.engine.checkpoint_manifest import require_unchanged_policy
        from craftcli.sources import open_policy

        require_unchanged_policy(config.policy)
        teacher = open_policy(config)
    if config.is_demo:
        data = ", its old task as data" if config.needs_dataset else ""
        output.note(f"Using the built-in demo: its policy as teacher{data}.")
    dataset = _open_data(config, teacher, output)
    if output.verbose:
        show_settings("Configuration", config, source.origin, output)
    if config.prompts is not None:
        _warn_of_idle_prompts(config, teacher, dataset, output)

    def announce(plan: "BuildPlan") -> None:
        kinds, predicted = plan.recipe.kinds, teacher.adapter.output_kind
        warn_of_unused(unused_in_building(kinds, source.given, output=predicted), output)
        _announce(plan, config, output)
        require_space(
            config.output,
            plan.size.total_bytes,
            what="the cache",
            fix="free some space, choose another disk with --output, or lower --samples.",
        )

    with (
        output.progress(config.rows, "rows", "Teacher") as advance,
        _noting_what_is_kept(config, output),
    ):
        report = build_cache(config, teacher, dataset, on_plan=announce, on_rows=advance)
    summary = summarize(CacheReader.open(config.output))
    _warn_of_invalid(report, output)
    output.say(f"Wrote {config.output}: {summary.rows} rows, {size(summary.size_bytes)} on disk.")
    output.next(after_build(config))
    output.json(
        {
            **summary.to_json(),
            "invalid_indices": list(report.invalid),
            "invalid_made_rows": report.invalid_made,
            "chunks_reused": report.reused,
        }
    )


def _open_data(config: CacheConfig, teacher: "Checkpoint", output: Output) -> Any:
    """The dataset of the anchors, or what takes its place in `open_source`."""
    from craftcli.demo.datasets import OLD
    from craftcli.sources import data_status, open_anchor_data, open_moving_data

    if config.env is not None:
        return record_episodes(config, teacher, output, exact=True)
    if config.from_statistics:
        if config.moves_like is None:
            output.note(
                "All numbers of a state are drawn apart. If some repeat others, as a state with "
                "the last observation in it, --moves-like NEW_DATA keeps these together."
            )
        return open_moving_data(config, teacher)
    with output.status(data_status(config, OLD)):
        return open_anchor_data(config, teacher)


def _assist(config: CacheConfig) -> None:
    """Compute a share of the chunks without printing; the first process prints."""
    from craftcli.cache.build.build import build_cache
    from craftcli.sources import open_policy

    teacher = open_policy(config)
    dataset = _open_data(config, teacher, Output(silent=True))
    build_cache(config, teacher, dataset, on_plan=lambda _: None, on_rows=lambda _: None)


def _warn_of_idle_prompts(
    config: CacheConfig, teacher: "Checkpoint", dataset: Any, output: Output
) -> None:
    """Warn when --prompts does not change what the policy is shown."""
    from craftcli.cache.build.prompts import read_prompts
    from craftcli.policies.lerobot.instructions import instructions_of, reads_instructions

    if not reads_instructions(teacher):
        output.warn(
            f"--prompts {config.prompts} has no effect: policies of type {teacher.policy_type} "
            "read no instructions."
        )
        return
    prompts = read_prompts(config.prompts, config.seed)
    if dataset is not None and not prompts.change(instructions_of(dataset)):
        output.warn(
            f"--prompts {config.prompts} changes no instruction: every frame keeps its own. If the "
            "policy is also trained on this data, such anchors oppose the task: they hold it to "
            "its old behaviour on the same frames under the same instructions, and neither the "
            "old nor the new skill was left when that was tried. List the old instructions "
            "instead."
        )


@contextmanager
def _noting_what_is_kept(config: CacheConfig, output: Output) -> Iterator[None]:
    """When a build stops early, print what it leaves for --resume."""
    from craftcli.cache.storage.base import UnreachableStoreError
    from craftcli.cache.storage.by_location import open_destination

    destination = open_destination(config.output)
    before = destination.interrupted_build()
    try:
        yield
    except UnreachableStoreError:
        # The store cannot be read now; the error says how to continue.
        raise
    except BaseException:
        kept = destination.interrupted_build()
        if kept and kept != before:
            output.note(f"Kept {kept}: craft cache build --resume continues from there.")
        raise


def _warn_of_invalid(report: "BuildReport", output: Output) -> None:
    if report.invalid:
        first = ", ".join(map(str, report.invalid[:5]))
        made = f" ({report.invalid_made} of them are made)" if report.invalid_made else ""
        output.warn(
            f"{len(report.invalid)} of {report.rows} rows are not finite and will not be trained "
            f"on{made}: dataset frames {first}{' ...' if len(report.invalid) > 5 else ''}."
        )


def _announce(plan: "BuildPlan", config: CacheConfig, output: Output) -> None:
    recipe = plan.recipe
    layers = ", ".join(f"{n} ({n - recipe.layer_count})" for n in recipe.layers)
    total = plan.size.total_bytes
    output.say(
        f"Storing {plan.rows} rows of about {size(plan.size.row_bytes)}, "
        f"{size(total)} in all, to {config.output}"
    )
    ways = [f"{option} (about {size(less)})" for option, less in plan.smaller.items()]
    if ways and total >= _LARGE:
        output.note(f"Options that store less: {', '.join(ways)}.")
    if plan.statistics.changed:
        output.say(f"Statistics: {' '.join(plan.statistics.sentences())}")
    for remark in plan.statistics.remarks():
        output.warn(remark)
    if plan.made:
        output.say(f"Of these rows {plan.made.rows} are made: {plan.made.describe()}.")
        if plan.made.source == "augment" and plan.rows - plan.made.rows == 1:
            output.note("One frame has no partner to be mixed with: --augment only adds noise.")
    # The layout may have been guessed from the shape, so the user should see it.
    layout = f" (axes of its states: {recipe.layout})" if recipe.layout else ""
    output.say(
        f"Layers {layers} of {recipe.layer_count} in stack {recipe.stack}{layout}, "
        f"pooling {recipe.pooling}, {recipe.dtype}"
    )
