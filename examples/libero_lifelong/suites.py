"""The suites that are learned one after the other: their data, and where success is measured."""

import importlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lerobot.datasets.dataset_tools import split_dataset

from craftcli.demo.world import instruction


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Tasks that are learned together."""

    name: str
    environment: str
    """As `craft eval --env` takes it."""
    instructions: Callable[[], Sequence[str]]
    """The instructions of its tasks, which say which episodes belong to it."""


def _libero_instructions(name: str) -> list[str]:
    # Of lerobot[libero], which craft does not install.
    benchmark = importlib.import_module("libero.libero.benchmark")
    return [task.language for task in benchmark.get_benchmark_dict()[name]().tasks]


LIBERO = tuple(
    Suite(
        name=name,
        environment=f"libero:{name}",
        instructions=lambda name=name: _libero_instructions(name),
    )
    for name in ("libero_spatial", "libero_object", "libero_goal", "libero_10")
)
STAND_IN = tuple(
    Suite(
        name=colour,
        environment=f"demo:{colour}",
        instructions=lambda colour=colour: [instruction(colour)],
    )
    for colour in ("red", "green", "yellow")
)
"""Instructions of the built-in demo, for --quick: no assets, no GPU."""


def split_by_suite(
    dataset: Any, suites: Sequence[Suite], folder: Path, *, most: int | None = None
) -> dict[str, Path]:
    """Write the episodes of each suite as a dataset of their own; those that are there are kept.

    `most` limits the episodes of a suite.

    Raises:
        ValueError: a suite has no episode in the dataset.
    """
    found = {suite.name: folder / suite.name for suite in suites}
    missing = [suite for suite in suites if not found[suite.name].is_dir()]
    if not missing:
        return found
    tasks = [{_plain(task) for task in tasks} for tasks in dataset.meta.episodes["tasks"]]
    splits = {}
    for suite in missing:
        wanted = {_plain(task) for task in suite.instructions()}
        splits[suite.name] = [number for number, own in enumerate(tasks) if own & wanted][:most]
        if not splits[suite.name]:
            raise ValueError(f"{dataset.repo_id} has no episode of {suite.name}: {sorted(wanted)}")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    split_dataset(dataset, splits, output_dir=partial)
    folder.mkdir(parents=True, exist_ok=True)
    for name in splits:
        (partial / name).rename(found[name])
    return found


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
