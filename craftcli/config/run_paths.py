"""Paths in the settings of a run: recorded as absolute ones, and found again when the run moves.

A run records every local path of its settings as an absolute one, that of its own folder (`output`)
among them. Who reads the run looks for a path in two places:

1. as it was recorded;
2. where it was as seen from the run: `../anchors.zarr`, say. So a run and a cache that are moved
   together still find each other.

Earlier versions recorded paths as the user typed them. Relative ones are looked for as seen from
the run first, then from the working directory.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from craftcli.config.dataset_list import parse_dataset
from craftcli.config.policy_and_data import DEMO
from craftcli.config.train import TrainConfig
from craftcli.local_policies import RUN_CONFIG
from craftcli.locations import RemotePath, locate

CONFIG_FILE = RUN_CONFIG
OUTPUT = "output"
_PLACES = ("cache", "dataset_root", "old_dataset_root", "anchor_root")
_NAMES = ("policy", "dataset", "old_dataset", "old_tasks", "eval_dataset")
"""These may also be names on the Hub: a path is what exists on this machine."""
_LISTS = ("dataset", "old_dataset")
"""These may be lists, whose entries may have weights."""
PATHS = (*_PLACES, *_NAMES)
"""The settings of a run that may be local paths, beside its own folder."""


def record_path(name: str, value: Any) -> Any:
    """A setting as a run records it: absolute if it is a local path, else unchanged."""
    if isinstance(value, tuple):
        return tuple(_weighted(entry, lambda own: record_path(name, own)) for entry in value)
    local = name == OUTPUT or (name in PATHS and _is_local(name, value))
    if value is None or not local:
        return value
    return type(value)(str(absolute(value)))


def record_paths(config: TrainConfig, run: Path) -> TrainConfig:
    """The settings of a new run with every local path absolute; `run` is its folder."""
    found = {name: record_path(name, getattr(config, name)) for name in PATHS}
    return replace(config, **found, output=absolute(run))


def find_paths(saved: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Saved settings, as JSON values, with every path where it is now."""
    found = {n: find_path(n, saved[n], saved, run) for n in PATHS if saved.get(n)}
    return {**saved, **found}


def find_path(name: str, value: Any, saved: Mapping[str, Any], run: Path) -> Any:
    """One path of saved settings where it is now; as recorded if it is nowhere.

    Of a list of datasets, every one.
    """
    if isinstance(value, list | tuple):
        return [_weighted(entry, lambda own: find_path(name, own, saved, run)) for entry in value]
    if not isinstance(value, str) or value == DEMO or _is_url(value):
        return value
    recorded = Path(value).expanduser()
    moved = _seen_from_run(recorded, saved, run)
    if not recorded.is_absolute() and name in _NAMES and moved is None:
        return value  # a name on the Hub
    places = (recorded, moved) if recorded.is_absolute() else (moved, recorded)
    return next((str(absolute(p)) for p in places if p is not None and p.exists()), value)


def find_beside(value: str, checkpoint: Path) -> str:
    """A path that a file of a checkpoint names, where it is now; as recorded if it is nowhere.

    `checkpoint` is the folder of a step in a run. Its own settings say where the run was.
    """
    try:
        saved = json.loads((checkpoint / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return value  # a checkpoint of LeRobot's own
    found = find_path("policy", value, saved, checkpoint.parent.parent)
    return str(found)


def same_path(name: str, run: Path, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two records of the settings of a run name the same path.

    They may differ in their text: the run was moved, or begun by an earlier version.
    """
    lists = [
        value if isinstance(value := saved.get(name), list | tuple) else [value]
        for saved in (one, other)
    ]
    if len(lists[0]) != len(lists[1]):
        return False
    return all(
        _forms(name, run, one, own) & _forms(name, run, other, theirs)
        for own, theirs in zip(*lists, strict=True)
    )


def absolute(path: str | Path) -> Path:
    """The path from the root of the disk. Links stay, unless `..` follows one."""
    whole = Path(path).expanduser().absolute()
    return whole.resolve() if ".." in whole.parts else whole


def _weighted(entry: str, change: Callable[[str], Any]) -> str:
    """An entry of a list of datasets with its path changed; its weight stays."""
    name = parse_dataset(entry).name
    return f"{change(name)}{entry[len(name) :]}"


def _forms(name: str, run: Path, saved: Mapping[str, Any], value: Any) -> set[Any]:
    """All texts that mean the same path, of a setting or of an entry of its list."""
    if not isinstance(value, str):
        return {value}
    path = parse_dataset(value).name if value and name in _LISTS else value
    seen = _seen_from_run(Path(path).expanduser(), saved, run)
    found = {path, find_path(name, path, saved, run), *([] if seen is None else [str(seen)])}
    return {f"{form}{value[len(path) :]}" for form in found}


def _seen_from_run(path: Path, saved: Mapping[str, Any], run: Path) -> Path | None:
    """Where a path lies now if it kept its place relative to the run; None if that is unknown."""
    # Earlier versions did not record the folder that they chose themselves.
    before = Path(saved.get(OUTPUT) or Path("runs") / run.name).expanduser()
    if path.is_absolute() != before.is_absolute():
        return None
    try:
        relative = os.path.relpath(path, before)
    except ValueError:  # on another drive of Windows
        return None
    return Path(os.path.normpath(absolute(run) / relative))


def _is_local(name: str, value: Any) -> bool:
    if value is None or isinstance(value, RemotePath) or value == DEMO or _is_url(str(value)):
        return False
    return name in _PLACES or Path(value).expanduser().exists()


def _is_url(value: str) -> bool:
    return "://" in value and isinstance(locate(value), RemotePath)
